"""The algorithm: a name that fills in a composition of five choices, each of which a job may override.

advantage (and its normalisation) → ratio level → clipping → aggregation → KL (where, and which estimator)
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlhfless_functions.settings.base import Settings

AlgorithmName = Literal["ppo", "grpo", "rloo", "reinforce_plus_plus", "dr_grpo", "dapo", "gspo", "cispo"]


class KlSettings(Settings):
    """The penalty on the distance to the reference policy."""

    coefficient: float = Field(default=0.0, ge=0)
    """Weight of the penalty (beta, kl_loss_coef, init_kl_coef); at 0 no reference model is loaded."""
    placement: Literal["loss", "reward"] = "loss"
    """Subtracted from the reward (token by token, or summed over the response with a group's baseline), or added to
    the loss."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators. In the loss, k1 is refused (its gradient has mean zero); in the reward, k1 is right."""

    @model_validator(mode="after")
    def _gradient_exists(self) -> Self:
        if self.coefficient > 0 and self.placement == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator: k1 in the loss has a gradient of mean zero; use k2 or k3, or placement: reward"
            )
        return self


class CriticSettings(Settings):
    """The value model of an actor-critic algorithm: a copy of the policy's body with a scalar head."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic; it follows the policy's schedule."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """New values are kept within this distance of the old ones in the loss (cliprange_value)."""
    warmup_steps: int = Field(default=0, ge=0)
    """First training steps in which only the critic learns."""


class ImportanceSamplingSettings(Settings):
    """Correction for the difference between the sampler's and the trainer's log-probabilities."""

    cap: float | None = Field(default=2.0, gt=0)
    """Upper bound of the importance weight exp(trainer − sampler) per token (TIS); no correction if null."""


class AlgorithmSettings(Settings):
    """The algorithm and all of its numbers. Whatever is left out is what `name` stands for."""

    name: AlgorithmName = "grpo"
    """The published algorithm whose composition is taken."""
    advantage: Literal["gae", "group", "leave_one_out", "discounted"] | None = None
    """Baseline: a critic (gae), the group's mean, the mean of the group's others, or none (discounted returns)."""
    advantage_normalization: Literal["group", "batch", "none"] | None = None
    """Divide by the group's standard deviation, whiten over the batch's tokens, or neither (scale_rewards)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """GAE's λ (lam)."""
    ratio_level: Literal["token", "sequence", "sequence_product"] | None = None
    """Importance ratio of each token, or the sequence's: their geometric mean (GSPO) or their product (RLOO)."""
    clip: Literal["ppo", "cispo"] | None = None
    """Clip the objective (ppo), or the detached weight of the log-probability's gradient (cispo)."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Ratios are clipped below 1 − this (epsilon, clip_ratio_low)."""
    clip_high: float | None = Field(default=None, ge=0)
    """Ratios are clipped above 1 + this (epsilon_high, clip_ratio_high)."""
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
    importance_sampling: ImportanceSamplingSettings = ImportanceSamplingSettings()
    """Correction for the difference between sampler and trainer."""
    critic: CriticSettings | None = None
    """The value model; only with `advantage: gae`."""
    dynamic_sampling_rounds: int | None = Field(default=None, ge=0, le=16)
    """How often groups with equal rewards are replaced by fresh prompts in a step (DAPO); 0 keeps them."""
    mask_truncated: bool = False
    """Leave samples that hit the longest response out of the loss (mask_truncated_completions)."""

    def resolved(self) -> "AlgorithmSettings":
        """The same settings with every choice that was left out filled in from the algorithm's name."""
        given: dict[str, Any] = {
            field: value for field in type(self).model_fields if (value := getattr(self, field)) is not None
        }
        whole = {**_COMMON, **_COMPOSITIONS[self.name], **given}
        # A critic comes and goes with the advantage, which a job may have changed.
        whole["critic"] = (self.critic or CriticSettings()) if whole["advantage"] == "gae" else None
        return AlgorithmSettings.model_construct(**whole)

    @model_validator(mode="after")
    def _pieces_fit(self) -> Self:
        whole = self.resolved()
        if self.critic is not None and whole.advantage != "gae":
            raise ValueError(f"critic: {self.name} has no critic; remove it, or set advantage: gae")
        if self.dual_clip is not None and whole.clip == "cispo":
            raise ValueError("dualClip: cispo bounds the ratio's weight on both sides already; remove it")
        if self.gamma != 1 and whole.advantage not in ("gae", "discounted"):
            raise ValueError(f"gamma: {whole.advantage} advantages know no discount; remove it, or set advantage: gae")
        if self.gae_lambda != 1 and whole.advantage != "gae":
            raise ValueError(f"gaeLambda: {whole.advantage} advantages have no λ; remove it, or set advantage: gae")
        if whole.advantage_normalization == "group" and whole.advantage not in ("group", "leave_one_out"):
            raise ValueError(
                f"advantageNormalization: group needs advantage: group or leave_one_out, not {whole.advantage}"
            )
        return self


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
# REINFORCE++ 2501.03262; Dr. GRPO 2503.20783; DAPO 2503.14476; GSPO 2507.18071; CISPO (MiniMax-M1) 2506.13585.
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
}
