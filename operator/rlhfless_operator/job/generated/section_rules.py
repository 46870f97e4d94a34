"""The checks of the settings' own validators, written for the API server (CEL)."""

from typing import get_args

from pydantic.alias_generators import to_camel

from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    DataSettings,
    ImportanceSamplingSettings,
    KlSettings,
    OpenEnvEnvironment,
    RejectionSettings,
    RewardSettings,
    ServedEnvironment,
    Settings,
)
from rlhfless_functions.settings.rewards import RewardKind
from rlhfless_operator.job.pods import VolumeSpec
from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.rule import CelRule
from rlhfless_operator.job.rules import of_algorithm

_ADVANTAGE = of_algorithm("self", "advantage", "advantage")
_NORMALIZATION = of_algorithm("self", "advantageNormalization", "advantage_normalization")
_CLIP = of_algorithm("self", "clip", "clip")
_RATIO_LEVEL = of_algorithm("self", "ratioLevel", "ratio_level")
_KINDS = ", ".join(f"has(self.{to_camel(kind)})" for kind in get_args(RewardKind))

SECTION_RULES: dict[type[Settings], tuple[CelRule, ...]] = {
    AlgorithmSettings: (
        CelRule(f"!has(self.critic) || {_ADVANTAGE} == 'gae'", "critic needs advantage: gae"),
        CelRule(
            f"{_NORMALIZATION} != 'group' || {_ADVANTAGE} in ['group', 'leave_one_out']",
            "advantageNormalization: group needs advantage: group or leave_one_out",
        ),
        CelRule(f"!has(self.dualClip) || {_CLIP} == 'ppo'", "dualClip needs clip: ppo"),
        CelRule(
            f"{_CLIP} != 'sapo' || !has(self.clipLow) && !has(self.clipHigh)",
            "clip: sapo uses a gate instead of clipLow and clipHigh",
        ),
        CelRule(
            f"{_CLIP} != 'gmpo' || {_RATIO_LEVEL} == 'sequence' && {_ADVANTAGE} in ['group', 'leave_one_out']",
            "clip: gmpo needs ratioLevel: sequence, and advantage: group or leave_one_out",
        ),
        CelRule(
            "self.proximalPolicy != 'sampler' || self.importanceSampling.mode == 'none' &&"
            " !has(self.importanceSampling.rejection) || self.importanceSampling.mode == 'truncate' &&"
            " self.importanceSampling.level == 'token' && self.importanceSampling.high == 2.0 &&"
            " !has(self.importanceSampling.low) && !has(self.importanceSampling.rejection)",
            "proximalPolicy: sampler already corrects stale samples and can't be combined with importanceSampling",
        ),
        CelRule(
            f"{_NORMALIZATION} != 'group_per_reward' || ({_ADVANTAGE} == 'group' &&"
            " (!has(self.kl) || self.kl.coefficient == 0.0 || self.kl.placement != 'reward'))",
            "advantageNormalization: group_per_reward needs advantage: group, and a kl.placement other than reward",
        ),
        CelRule(
            f"!has(self.whitenOver) || {_NORMALIZATION} in ['batch', 'group_per_reward']",
            "whitenOver needs advantageNormalization: batch or group_per_reward",
        ),
        CelRule(
            f"!has(self.whitenOver) || self.whitenOver == 'tokens' || {_ADVANTAGE} in ['group', 'leave_one_out']",
            "whitenOver: samples needs advantage: group or leave_one_out",
        ),
    ),
    ImportanceSamplingSettings: (CelRule("!has(self.low) || self.low < self.high", "low must be less than high"),),
    RejectionSettings: (CelRule("!has(self.low) || self.low < self.high", "low must be less than high"),),
    KlSettings: (
        CelRule(
            "self.coefficient == 0.0 || self.placement != 'loss' || !has(self.estimator) || self.estimator != 'k1'",
            "estimator: k1 in the loss has a gradient of mean zero",
        ),
        CelRule(
            "self.coefficient == 0.0 || self.placement != 'reward' || !has(self.estimator) || self.estimator == 'k1'",
            "estimator: k2 and k3 in the reward have a different gradient from the KL's",
        ),
    ),
    BatchSettings: (
        CelRule(
            "!has(self.minibatchSamples) || self.promptsPerStep * self.samplesPerPrompt % self.minibatchSamples == 0",
            "minibatchSamples must divide promptsPerStep × samplesPerPrompt",
        ),
    ),
    OpenEnvEnvironment: (
        CelRule("has(self.url) || has(self.image) || has(self.command)", "openenv needs url, image or command"),
        CelRule(
            "!has(self.url) || !has(self.image) && !has(self.command) && !has(self.port) && !has(self.sessions) &&"
            " !has(self.containers)",
            "openenv.url is a server that runs already, and goes without image, command, port, sessions and containers",
        ),
    ),
    ServedEnvironment: (
        CelRule(
            "!has(self.url) || !has(self.image) && !has(self.sessions) && !has(self.containers)",
            "served.url is a server that runs already, and goes without image, sessions and containers",
        ),
    ),
    DataSettings: (CelRule("has(self.source) != has(self.sources)", "data needs source or sources"),),
    RewardSettings: (CelRule(f"[{_KINDS}].filter(given, given).size() == 1", "a reward needs exactly one kind"),),
    VolumeSpec: (
        CelRule(
            "[has(self.claim), has(self.hostPath), has(self.secret), has(self.configMap)]"
            ".filter(given, given).size() == 1",
            "a volume needs exactly one of claim, hostPath, secret and configMap",
        ),
    ),
    BudgetSpec: (CelRule("has(self.money) || has(self.gpuHours)", "a budget needs money, gpuHours or both"),),
}
"""By section; `self` is the section."""
