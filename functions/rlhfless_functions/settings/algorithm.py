"""The algorithm: a name that fills in a composition of five choices, each of which a job may override.

advantage (and its normalisation) → ratio level → clipping → aggregation → KL (where, and which estimator)
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from rlhfless_functions.settings.base import Settings

AlgorithmName = Literal[
    "ppo", "grpo", "rloo", "reinforce_plus_plus", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo"
]


def check_range(low: float | None, high: float) -> None:
    """Raise ValueError unless a lower bound, where there is one, is less than the upper bound."""
    if low is not None and low >= high:
        raise ValueError(f"low: {low:g} is not less than high, {high:g}; lower it, or raise high")


class KlSettings(Settings):
    """The penalty on the distance to the reference policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the penalty (beta, kl_loss_coef, init_kl_coef); at 0 no reference model is loaded."""
    placement: Literal["loss", "reward"] = "loss"
    """Subtracted from the reward (token by token, or summed over the response with a group's baseline), or added to
    the loss."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """Schulman's estimators; k1 in the reward and k3 in the loss if left out. The others are refused where their
    gradient is not that of the KL: k1 in the loss, k2 and k3 in the reward."""

    @model_validator(mode="after")
    def _gradient_is_that_of_the_kl(self) -> Self:
        if self.coefficient == 0 or self.estimator is None:
            return self
        if self.placement == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator: k1 in the loss has a gradient of mean zero; use k2 or k3, or placement: reward"
            )
        if self.placement == "reward" and self.estimator != "k1":
            raise ValueError(
                f"estimator: {self.estimator} in the reward has another gradient than the KL;"
                " use k1, or placement: loss"
            )
        return self

    def resolved(self) -> "KlSettings":
        """The same settings with the estimator that their placement asks for."""
        if self.estimator is not None:
            return self
        return self.model_copy(update={"estimator": "k1" if self.placement == "reward" else "k3"})


class CriticSettings(Settings):
    """The value model of an actor-critic algorithm: a copy of the policy's body with a scalar head."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic; it follows the policy's schedule."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """New values are kept within this distance of the old ones in the loss (cliprange_value)."""
    warmup_steps: int = Field(default=0, ge=0)
    """First training steps in which only the critic learns."""


class RejectionSettings(Settings):
    """What is left out of the policy's loss because the policy has moved too far from what sampled it. What is left out
    still counts in the loss's mean."""

    level: Literal["token", "sequence_product", "geometric_mean"] = "geometric_mean"
    """Leave out each token by its own ratio, or a whole response by the product or the geometric mean of its tokens'
    ratios. The length of a response does not change its geometric mean."""
    low: float | None = Field(default=None, gt=0)
    """Ratios below this are left out; none if left out."""
    high: float = Field(gt=0)
    """Ratios above this are left out. For geometric means verl uses 1.001, and SkyRL 1.01."""

    @model_validator(mode="after")
    def _bounds_are_a_range(self) -> Self:
        check_range(self.low, self.high)
        return self


class ImportanceSamplingSettings(Settings):
    """Correction for the difference between the sampler's and the trainer's log-probabilities: each token's policy loss
    is multiplied by an importance weight, exp(trainer − sampler)."""

    mode: Literal["truncate", "mask", "none"] = "truncate"
    """What becomes of a weight that is out of bounds: the bound (TIS), 0 (IcePop, MIS), or no weights at all."""
    level: Literal["token", "sequence_product", "geometric_mean"] = "token"
    """Weigh each token by its own ratio, or by that of its response: the product of its tokens' ratios, or their
    geometric mean (whose bounds lie much closer to 1, such as 0.99 and 1.01)."""
    low: float | None = Field(default=None, gt=0)
    """Lower bound of a weight; none if left out. IcePop masks tokens below 0.5."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound of a weight. IcePop masks tokens above 5, TRL responses above 3."""
    rejection: RejectionSettings | None = None
    """Leave tokens or responses out by a ratio of their own, whatever `mode` makes of the weights of the others. With
    `mode: truncate` by token and a geometric mean here this is NeMo-RL's seq-mask-tis, and verl's `rollout_rs`."""

    @property
    def corrects_when_told(self) -> bool:
        """Whether a job asks for a correction of its own, not for the one that all have."""
        return self.rejection is not None or (self.mode != "none" and self != ImportanceSamplingSettings())

    @model_validator(mode="after")
    def _bounds_are_a_range(self) -> Self:
        check_range(self.low, self.high)
        return self


class AlgorithmSettings(Settings):
    """The algorithm and all of its numbers. Whatever is left out is what `name` stands for."""

    name: AlgorithmName = "grpo"
    """The published algorithm whose composition is taken."""
    advantage: Literal["gae", "group", "leave_one_out", "discounted"] | None = None
    """Baseline: a critic (gae), the group's mean, the mean of the group's others, or none (discounted returns)."""
    advantage_normalization: Literal["group", "group_per_reward", "batch", "none"] | None = None
    """Divide by the group's standard deviation, whiten over the batch's tokens, or neither (scale_rewards);
    `group_per_reward`: each reward by its own in the group, then weighted, summed and whitened (GDPO)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """GAE's λ (lam)."""
    ratio_level: Literal["token", "sequence", "sequence_product"] | None = None
    """Importance ratio of each token, or the sequence's: their geometric mean (GSPO) or their product (RLOO)."""
    clip: Literal["ppo", "cispo", "gmpo", "sapo"] | None = None
    """Clip the objective (ppo), the detached weight of the log-probability's gradient (cispo), each token's ratio
    before their geometric mean is taken (gmpo), or nothing, and let a soft gate fade far ratios out (sapo)."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Ratios are clipped below 1 − this (epsilon, clip_ratio_low)."""
    clip_high: float | None = Field(default=None, ge=0)
    """Ratios are clipped above 1 + this (epsilon_high, clip_ratio_high)."""
    sapo_temperature_positive: float = Field(default=1.0, gt=0)
    """How fast SAPO's gate closes where the advantage is positive (sapo_temperature_pos, tau_pos)."""
    sapo_temperature_negative: float = Field(default=1.05, gt=0)
    """The same where it is not (sapo_temperature_neg, tau_neg)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With a negative advantage the objective is bounded at this multiple of it (clip_ratio_c, delta)."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """Mean over all tokens, mean of sequence means, or sequence sums over the longest response (loss_agg_mode)."""
    kl: KlSettings | None = None
    """The penalty on the distance to the reference policy."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus in the loss."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each step's batch (ppo_epochs, num_iterations)."""
    proximal_policy: Literal["learner", "sampler"] = "learner"
    """What the ratio is taken against. `learner`: the learner's policy as the step began, while `importanceSampling`
    corrects for what sampled the tokens (decoupled PPO). `sampler`: what sampled the tokens (plain PPO; verl's
    bypass_mode)."""
    importance_sampling: ImportanceSamplingSettings = ImportanceSamplingSettings()
    """Correction for the difference between sampler and trainer."""
    critic: CriticSettings | None = None
    """The value model; only with `advantage: gae`."""
    dynamic_sampling_rounds: int | None = Field(default=None, ge=0, le=16)
    """How often groups with equal rewards are replaced by fresh prompts in a step (DAPO); 0 keeps them. Once the rounds
    or the prompts are used up they fill the batch."""
    mask_truncated: bool = False
    """Leave samples that hit the longest response out of the loss (mask_truncated_completions)."""

    @property
    def normalizes_batch(self) -> bool:
        """Whether advantages are normalised over a whole step; of resolved settings."""
        return self.advantage_normalization in ("batch", "group_per_reward")

    def resolved(self) -> "AlgorithmSettings":
        """The same settings with every choice that was left out filled in from the algorithm's name."""
        given: dict[str, Any] = {
            field: value for field in type(self).model_fields if (value := getattr(self, field)) is not None
        }
        whole = {**_COMMON, **_COMPOSITIONS[self.name], **given}
        whole["kl"] = whole["kl"].resolved()
        # A critic comes and goes with the advantage, which a job may have changed.
        whole["critic"] = (self.critic or CriticSettings()) if whole["advantage"] == "gae" else None
        if whole["clip"] == "sapo":
            whole |= {"clip_low": None, "clip_high": None}
        return AlgorithmSettings.model_construct(**whole)

    @model_validator(mode="after")
    def _pieces_fit(self) -> Self:
        whole = self.resolved()
        if self.critic is not None and whole.advantage != "gae":
            raise ValueError(f"critic: {self.name} has no critic; remove it, or set advantage: gae")
        if self.dual_clip is not None and whole.clip == "cispo":
            raise ValueError("dualClip: cispo bounds the ratio's weight on both sides already; remove it")
        if self.dual_clip is not None and whole.clip != "ppo":
            raise ValueError(f"dualClip: it bounds the objective of clip: ppo, not of {whole.clip}; remove it")
        if whole.clip == "sapo" and (self.clip_low is not None or self.clip_high is not None):
            name = "clipLow" if self.clip_low is not None else "clipHigh"
            raise ValueError(
                f"{name}: sapo has a gate instead of bounds; use sapoTemperaturePositive and sapoTemperatureNegative"
            )
        for name in ("sapo_temperature_positive", "sapo_temperature_negative"):
            if whole.clip != "sapo" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{to_camel(name)}: only sapo has a gate; remove it, or set clip: sapo")
        if whole.clip == "gmpo" and whole.ratio_level != "sequence":
            raise ValueError("ratioLevel: gmpo is a geometric mean over the sequence; remove it, or set sequence")
        if whole.clip == "gmpo" and whole.advantage not in ("group", "leave_one_out"):
            raise ValueError("clip: gmpo needs one advantage a sample; use advantage: group or leave_one_out")
        if self.proximal_policy == "sampler" and self.importance_sampling.corrects_when_told:
            raise ValueError(
                "proximalPolicy: the ratio against the sampler is the correction already;"
                " remove importanceSampling, or set proximalPolicy: learner"
            )
        if self.gamma != 1 and whole.advantage not in ("gae", "discounted"):
            raise ValueError(f"gamma: {whole.advantage} advantages know no discount; remove it, or set advantage: gae")
        if self.gae_lambda != 1 and whole.advantage != "gae":
            raise ValueError(f"gaeLambda: {whole.advantage} advantages have no λ; remove it, or set advantage: gae")
        if whole.advantage_normalization == "group" and whole.advantage not in ("group", "leave_one_out"):
            raise ValueError(
                f"advantageNormalization: group needs advantage: group or leave_one_out, not {whole.advantage}"
            )
        if whole.advantage_normalization == "group_per_reward":
            _check_per_reward(whole)
        return self


def _check_per_reward(whole: AlgorithmSettings) -> None:
    if whole.advantage != "group":
        raise ValueError(f"advantageNormalization: group_per_reward needs advantage: group, not {whole.advantage}")
    if whole.kl is not None and whole.kl.coefficient > 0 and whole.kl.placement == "reward":
        raise ValueError(
            "kl.placement: reward is no reward of its own to normalise; with advantageNormalization: group_per_reward"
            " set placement: loss"
        )


_COMMON: dict[str, Any] = {
    "advantage": "group",
    "advantage_normalization": "group",
    "ratio_level": "token",
    "clip": "ppo",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "aggregation": "token-mean",
    "kl": KlSettings(),
    "dynamic_sampling_rounds": 0,
}

# Sources: PPO arXiv 1707.06347; GRPO 2402.03300 with the token mean that TRL and verl use today; RLOO 2402.14740;
# REINFORCE++ 2501.03262; Dr. GRPO 2503.20783; DAPO 2503.14476; GSPO 2507.18071; CISPO (MiniMax-M1) 2506.13585; GMPO
# 2507.20673, whose bounds are exp(−0.4) and exp(0.4); SAPO 2511.20347.
_COMPOSITIONS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": "gae", "advantage_normalization": "batch"},
    "grpo": {},
    "rloo": {
        "advantage": "leave_one_out",
        "advantage_normalization": "none",
        "ratio_level": "sequence_product",
        "aggregation": "seq-mean-token-mean",
    },
    "reinforce_plus_plus": {"advantage": "discounted", "advantage_normalization": "batch"},
    "dr_grpo": {"advantage_normalization": "none", "aggregation": "seq-mean-token-sum-norm"},
    "dapo": {"clip_high": 0.28, "dynamic_sampling_rounds": 4},
    "gspo": {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    "cispo": {"clip": "cispo", "clip_low": 1.0, "clip_high": 0.28},
    "gmpo": {
        "ratio_level": "sequence",
        "clip": "gmpo",
        "clip_low": 0.3297,
        "clip_high": 0.4918,
        "aggregation": "seq-mean-token-mean",
    },
    "sapo": {"clip": "sapo", "aggregation": "seq-mean-token-mean"},
}
