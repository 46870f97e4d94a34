"""The algorithm: a name that sets five choices. A job may override each of them.

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
    """Raise ValueError unless the lower bound, if there is one, is less than the upper bound."""
    if low is not None and low >= high:
        raise ValueError(f"low: {low:g} is not less than high, {high:g}; lower it, or raise high")


class KlSettings(Settings):
    """The penalty on the distance to the reference policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the penalty (beta, kl_loss_coef, init_kl_coef); at 0 no reference model is loaded."""
    placement: Literal["loss", "reward"] = "loss"
    """Whether the penalty is subtracted from the reward (token by token, or summed over the response if the baseline is
    the group's), or added to the loss."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """Schulman's estimators; by default k1 in the reward and k3 in the loss. An estimator is refused if its gradient is
    not that of the KL: k1 in the loss, k2 and k3 in the reward."""

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
                f"estimator: {self.estimator} in the reward has a different gradient from the KL's;"
                " use k1, or placement: loss"
            )
        return self

    def resolved(self) -> "KlSettings":
        """Return a copy with the default estimator of its placement filled in."""
        if self.estimator is not None:
            return self
        return self.model_copy(update={"estimator": "k1" if self.placement == "reward" else "k3"})


class CriticSettings(Settings):
    """The value model of an actor-critic algorithm: a copy of the policy's body with a scalar head."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic. Its schedule has the shape of the policy's, and counts all steps."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """The loss clips new values to within this distance of the old ones (cliprange_value)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of training steps at the start in which only the critic learns. The policy's schedule begins after them.
    OpenRLHF's freezing_actor_steps counts alike; verl's critic_warmup is one more."""


class RejectionSettings(Settings):
    """Rejects samples from the policy's loss if the policy has moved too far from the one that sampled them. Rejected
    samples still count in the denominator of the loss's mean."""

    level: Literal["token", "sequence_product", "geometric_mean"] = "geometric_mean"
    """Reject each token by its own ratio, or a whole response by the product or the geometric mean of its tokens'
    ratios. A geometric mean does not depend on the response's length."""
    low: float | None = Field(default=None, gt=0)
    """Reject ratios below this; by default there is no lower bound."""
    high: float = Field(gt=0)
    """Reject ratios above this. For geometric means verl uses 1.001, and SkyRL 1.01."""

    @model_validator(mode="after")
    def _bounds_are_a_range(self) -> Self:
        check_range(self.low, self.high)
        return self


class ImportanceSamplingSettings(Settings):
    """Correction for the difference between the sampler's and the trainer's log-probabilities: each token's policy loss
    is multiplied by an importance weight, exp(trainer − sampler)."""

    mode: Literal["truncate", "mask", "none"] = "truncate"
    """`truncate` sets a weight out of bounds to the bound (TIS), `mask` sets it to 0 (IcePop, MIS), and `none` uses no
    weights."""
    level: Literal["token", "sequence_product", "geometric_mean"] = "token"
    """Weigh each token by its own ratio, or by that of its response: the product of its tokens' ratios, or their
    geometric mean (whose bounds lie much closer to 1, such as 0.99 and 1.01)."""
    low: float | None = Field(default=None, gt=0)
    """Lower bound of a weight; by default there is none. IcePop masks tokens below 0.5."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound of a weight. IcePop masks tokens above 5, TRL responses above 3."""
    rejection: RejectionSettings | None = None
    """Reject tokens or responses by a separate ratio, independently of `mode`. `mode: truncate` by token with a
    geometric mean here is NeMo-RL's seq-mask-tis, and verl's `rollout_rs`."""

    @property
    def corrects_when_told(self) -> bool:
        """Whether a job asks for a correction other than the default one."""
        return self.rejection is not None or (self.mode != "none" and self != ImportanceSamplingSettings())

    @model_validator(mode="after")
    def _bounds_are_a_range(self) -> Self:
        check_range(self.low, self.high)
        return self


class AlgorithmSettings(Settings):
    """The algorithm and all of its hyperparameters. `name` sets the default of every field that you omit."""

    name: AlgorithmName = "grpo"
    """The published algorithm that sets the defaults."""
    advantage: Literal["gae", "group", "leave_one_out", "discounted"] | None = None
    """Baseline: a critic (gae), the group's mean, the mean of the group's other samples, or none (discounted
    returns)."""
    advantage_normalization: Literal["group", "group_per_reward", "batch", "none"] | None = None
    """Divide by the group's standard deviation, whiten over the batch, or neither (scale_rewards). `group_per_reward`
    divides each reward by its own standard deviation in the group, then weights, sums and whitens (GDPO)."""
    whiten_over: Literal["samples", "tokens"] | None = None
    """Whether a mean over the batch counts each sample once, or each token. By default `group_per_reward` whitens over
    samples, as TRL and NeMo-RL do, and `batch` over tokens. verl's GDPO whitens over tokens: a group of equal rewards
    then gets advantages other than 0 as soon as other groups' good and bad responses differ in length."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """GAE's λ (lam)."""
    ratio_level: Literal["token", "sequence", "sequence_product"] | None = None
    """Importance ratio of each token, or of the sequence: the geometric mean of its tokens' ratios (GSPO) or their
    product (RLOO)."""
    clip: Literal["ppo", "cispo", "gmpo", "sapo"] | None = None
    """Clip the objective (ppo), the detached weight of the log-probability's gradient (cispo), or each token's ratio
    before the geometric mean (gmpo). `sapo` clips nothing: a soft gate fades out ratios far from 1."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Ratios are clipped below 1 − this (epsilon, clip_ratio_low)."""
    clip_high: float | None = Field(default=None, ge=0)
    """Ratios are clipped above 1 + this (epsilon_high, clip_ratio_high)."""
    sapo_temperature_positive: float = Field(default=1.0, gt=0)
    """How fast SAPO's gate closes for positive advantages (sapo_temperature_pos, tau_pos)."""
    sapo_temperature_negative: float = Field(default=1.05, gt=0)
    """How fast SAPO's gate closes for other advantages (sapo_temperature_neg, tau_neg)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For a negative advantage, bound the objective at this multiple of it (clip_ratio_c, delta)."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """Mean over all tokens, mean of sequence means, or sums of sequences divided by the longest response's length
    (loss_agg_mode)."""
    kl: KlSettings | None = None
    """The penalty on the distance to the reference policy."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus in the loss."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each step's batch (ppo_epochs, num_iterations)."""
    proximal_policy: Literal["learner", "sampler"] = "learner"
    """Policy in the ratio's denominator. `learner` is the learner's policy at the beginning of the step, and
    `importanceSampling` corrects for the policy that sampled the tokens (decoupled PPO). `sampler` is the policy that
    sampled the tokens (plain PPO; verl's bypass_mode)."""
    importance_sampling: ImportanceSamplingSettings = ImportanceSamplingSettings()
    """Correction for the difference between sampler and trainer."""
    critic: CriticSettings | None = None
    """The value model; only with `advantage: gae`."""
    dynamic_sampling_rounds: int | None = Field(default=None, ge=0, le=16)
    """Most rounds in a step that replace groups with equal rewards by fresh prompts (DAPO); 0 keeps such groups. A
    group is replaced as soon as it is scored, while others are still generated. Once the rounds or the prompts are used
    up, such groups fill the batch."""
    mask_truncated: bool = False
    """Exclude samples that reached the longest response from the loss (mask_truncated_completions)."""

    @property
    def normalizes_batch(self) -> bool:
        """Whether advantages are normalised over a whole step. Call it on resolved settings."""
        return self.advantage_normalization in _WHITENED_OVER

    def resolved(self) -> "AlgorithmSettings":
        """Return a copy in which the algorithm's name has filled in every omitted choice."""
        given: dict[str, Any] = {
            field: value for field in type(self).model_fields if (value := getattr(self, field)) is not None
        }
        whole = {**_COMMON, **_COMPOSITIONS[self.name], **given}
        whole["kl"] = whole["kl"].resolved()
        # Whether there is a critic depends on the advantage, which a job may have changed.
        whole["critic"] = (self.critic or CriticSettings()) if whole["advantage"] == "gae" else None
        whole.setdefault("whiten_over", _WHITENED_OVER.get(whole["advantage_normalization"]))
        if whole["clip"] == "sapo":
            whole |= {"clip_low": None, "clip_high": None}
        return AlgorithmSettings.model_construct(**whole)

    @model_validator(mode="after")
    def _pieces_fit(self) -> Self:
        whole = self.resolved()
        if self.critic is not None and whole.advantage != "gae":
            raise ValueError(f"critic: {self.name} has no critic; remove it, or set advantage: gae")
        if self.dual_clip is not None and whole.clip == "cispo":
            raise ValueError("dualClip: cispo already bounds the ratio's weight on both sides; remove it")
        if self.dual_clip is not None and whole.clip != "ppo":
            raise ValueError(f"dualClip: it bounds the objective of clip: ppo, not of {whole.clip}; remove it")
        if whole.clip == "sapo" and (self.clip_low is not None or self.clip_high is not None):
            name = "clipLow" if self.clip_low is not None else "clipHigh"
            raise ValueError(
                f"{name}: sapo uses a gate instead of bounds; set sapoTemperaturePositive and sapoTemperatureNegative"
            )
        for name in ("sapo_temperature_positive", "sapo_temperature_negative"):
            if whole.clip != "sapo" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{to_camel(name)}: only sapo has a gate; remove it, or set clip: sapo")
        if whole.clip == "gmpo" and whole.ratio_level != "sequence":
            raise ValueError("ratioLevel: gmpo is a geometric mean over the sequence; remove it, or set sequence")
        if whole.clip == "gmpo" and whole.advantage not in ("group", "leave_one_out"):
            raise ValueError("clip: gmpo needs one advantage per sample; use advantage: group or leave_one_out")
        if self.proximal_policy == "sampler" and self.importance_sampling.corrects_when_told:
            raise ValueError(
                "proximalPolicy: the ratio against the sampler already corrects stale samples;"
                " remove importanceSampling, or set proximalPolicy: learner"
            )
        if self.gamma != 1 and whole.advantage not in ("gae", "discounted"):
            raise ValueError(f"gamma: {whole.advantage} advantages have no discount; remove it, or set advantage: gae")
        if self.gae_lambda != 1 and whole.advantage != "gae":
            raise ValueError(f"gaeLambda: {whole.advantage} advantages have no λ; remove it, or set advantage: gae")
        if whole.advantage_normalization == "group" and whole.advantage not in ("group", "leave_one_out"):
            raise ValueError(
                f"advantageNormalization: group needs advantage: group or leave_one_out, not {whole.advantage}"
            )
        if whole.advantage_normalization == "group_per_reward":
            _check_per_reward(whole)
        if self.whiten_over is not None and not whole.normalizes_batch:
            raise ValueError(
                f"whitenOver: advantageNormalization: {whole.advantage_normalization} does not whiten; remove it, or"
                " set advantageNormalization: batch or group_per_reward"
            )
        if whole.whiten_over == "samples" and whole.advantage not in ("group", "leave_one_out"):
            raise ValueError(
                f"whitenOver: the tokens of a response have different {whole.advantage} advantages; write tokens, or"
                " set advantage: group or leave_one_out"
            )
        return self


def _check_per_reward(whole: AlgorithmSettings) -> None:
    if whole.advantage != "group":
        raise ValueError(f"advantageNormalization: group_per_reward needs advantage: group, not {whole.advantage}")
    if whole.kl is not None and whole.kl.coefficient > 0 and whole.kl.placement == "reward":
        raise ValueError(
            "kl.placement: advantageNormalization: group_per_reward can't normalise a penalty in the reward;"
            " set placement: loss"
        )


_WHITENED_OVER: dict[str, str] = {"batch": "tokens", "group_per_reward": "samples"}
"""The normalisations that whiten over the batch, each with what it counts unless the job says so."""

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
