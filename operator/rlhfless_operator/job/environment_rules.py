"""Rules over `environment` and other fields of a job."""

from collections.abc import Sequence

from rlhfless_functions.settings import RewardSettings
from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec
from rlhfless_operator.job.rule import CelRule, Rule
from rlhfless_operator.job.sections import JobFields

_PODS = "environment.letGo: auto, environment.served, or environment.openenv.image or command"


def _can_be_combined(spec: JobFields) -> str | None:
    if spec.environment is None:
        return None
    if spec.generation.drafting != "never":
        return "an environment can't be combined with drafting yet; write generation.drafting: never"
    if spec.sampling.stop:
        return "turns end with the model's own tokens, not with sampling.stop; remove one of the two"
    return None


def _scores_exist(spec: JobFields, rewards: Sequence[RewardSettings]) -> str | None:
    if all(reward.environment is None for reward in rewards):
        return None
    if spec.environment is None:
        return "a reward is the environment's score, but the job has no environment; add spec.environment"
    if not spec.environment.is_scored:
        return "tools alone give no score; add environment.python, or take another reward"
    return None


def _pods_are_of_an_environment(spec: JobFields) -> str | None:
    if spec.environment is None or spec.environment.pods == PodsSpec():
        return None
    if not spec.has_environment_pods:
        return f"the job has no pods of an environment; remove them, or write {_PODS}"
    if spec.environment.pods.image is not None and spec.environment_server is None:
        return "the pod that keeps episodes has the image of generation's pods; remove pods.image"
    if spec.environment.pods.image is not None:
        section = "openenv" if spec.environment.served is None else "served"
        return f"the server's image is environment.{section}.image; write it there, and remove pods.image"
    resources = spec.environment.pods.resources or ResourcesSpec()
    asked = {**(resources.requests or {}), **(resources.limits or {})}
    if gpus := [name for name in asked if name.endswith("/gpu")]:
        return f"environments run on CPUs, because prices and pools count no GPUs of them; remove {gpus[0]}"
    return None


def _price_is_of_an_environment(spec: JobFields) -> str | None:
    if spec.prices.stages.environment is None or spec.has_environment_pods:
        return None
    return f"the job has no pods of an environment; remove the price, or write {_PODS}"


_HAS_SCORES = "has(self.environment) && (has(self.environment.python) || has(self.environment.openenv))"

ENVIRONMENT_RULES = (
    Rule(
        "environment",
        ("environment", "generation.drafting", "sampling.stop"),
        _can_be_combined,
        CelRule(
            "!has(self.environment) || self.generation.drafting == 'never' && size(self.sampling.stop) == 0",
            "environment can't be combined with generation.drafting or sampling.stop yet",
        ),
    ),
    Rule(
        "environment.pods",
        ("environment",),
        _pods_are_of_an_environment,
        CelRule(None, f"environment.pods needs {_PODS}, and has neither an image nor GPUs"),
    ),
    Rule(
        "prices.stages.environment",
        ("prices.stages.environment", "environment"),
        _price_is_of_an_environment,
        CelRule(None, f"prices.stages.environment needs {_PODS}"),
    ),
    Rule(
        "rewards",
        ("rewards", "environment"),
        lambda spec: _scores_exist(spec, spec.rewards),
        CelRule(
            f"!self.rewards.exists(r, has(r.environment)) || {_HAS_SCORES}",
            "a reward that is the environment's score needs environment.python or environment.openenv",
        ),
    ),
    Rule(
        "evaluation.rewards",
        ("evaluation", "environment"),
        lambda spec: _scores_exist(spec, (spec.evaluation.rewards if spec.evaluation else None) or ()),
        CelRule(
            "!has(self.evaluation) || !has(self.evaluation.rewards) ||"
            f" !self.evaluation.rewards.exists(r, has(r.environment)) || {_HAS_SCORES}",
            "a reward that is the environment's score needs environment.python or environment.openenv",
        ),
    ),
)
