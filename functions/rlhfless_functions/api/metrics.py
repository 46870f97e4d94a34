"""The metrics that the functions report: names, units and meanings. Tests compare them with what jobs write.

A part of a name in angle brackets stands for a name that the job gives: `<reward>` is a reward's.
"""

from dataclasses import dataclass
from typing import Literal

Unit = Literal[
    "number", "share", "reward", "nats per token", "tokens", "samples", "groups", "updates", "bytes", "seconds",
    "instance-seconds", "instances", "requests", "versions",
]  # fmt: skip
"""`share` is from 0 to 1; `number` has no unit; `reward` is in units of the rewards' weighted sum."""


@dataclass(frozen=True)
class Metric:
    """What a number of a step means."""

    unit: Unit
    meaning: str
    """A sentence."""


PREPARATION_METRICS: dict[str, Metric] = {
    "reward": Metric("reward", "Weighted sum of the reward terms, mean over the samples that could be scored."),
    "reward/std": Metric("reward", "The same, standard deviation."),
    "reward/unscorable": Metric("samples", "Samples without a reward."),
    "reward/<reward>": Metric("number", "A term's own number before weighting, mean over the samples that it scored."),
    "reward/<reward>/unscorable": Metric("samples", "Samples that the term did not score."),
    "reward/<reward>/errors": Metric("groups", "Groups for which the reward failed."),
    "reward/<reward>/timed_out": Metric(
        "share", "Share of its checks of a response that took too long and were ended."
    ),
    "reward/<reward>/crashed": Metric("share", "Share of its checks of a response that ended their process."),
    "reward/<reward>/<logged>": Metric("number", "What the reward's function logged by `log_metric`, mean."),
    "groups": Metric("groups", "Groups that were prepared, those that were replaced included."),
    "zero_variance_groups": Metric(
        "groups", "Of these, groups with equal rewards: they teach nothing where the group is the baseline."
    ),
    "lengths": Metric("tokens", "Response tokens of the prepared samples, EOS included, mean."),
    "prompt_lengths": Metric("tokens", "Tokens of the prepared groups' prompts, mean."),
    "truncated": Metric("share", "Responses that hit the longest response."),
    "masked": Metric("samples", "Samples left out of the loss: unscorable, or truncated and masked."),
    "values": Metric("reward", "The critic's values, mean per token."),
    "seconds/rewards": Metric("seconds", "Preparation's time with rewards, all chunks together."),
    "seconds/models": Metric("seconds", "Preparation's time with models, all chunks together; the two overlap."),
}
"""What preparation makes of a step's samples, and of an evaluation's. Chunks are added up by the control plane: `X/sum`
over `X/count` is the mean `X`."""

LEARNING_METRICS: dict[str, Metric] = {
    "policy/loss": Metric("number", "Loss of the policy, mean over the step's optimizer updates."),
    "policy/entropy": Metric(
        "nats per token", "Entropy of the policy's distributions at the sampling temperature, mean per token."
    ),
    "policy/kl": Metric("nats per token", "KL(old ‖ new) within the step, k3 estimate, mean per token."),
    "policy/clip_fraction_low": Metric(
        "share", "Share of tokens (or samples) whose gradient the lower bound of the ratio cut off."
    ),
    "policy/clip_fraction_high": Metric(
        "share", "Share of tokens (or samples) whose gradient the upper bound of the ratio cut off."
    ),
    "policy/ratio_mean": Metric("number", "Importance ratio new / proximal policy (`proximalPolicy`), mean."),
    "policy/ratio_min": Metric("number", "Importance ratio new / old, least."),
    "policy/ratio_max": Metric("number", "Importance ratio new / old, greatest."),
    "policy/gradient_norm": Metric(
        "number", "Global norm of the policy's gradient before clipping, mean over the updates."
    ),
    "policy/gradient_norm_max": Metric("number", "The same, greatest."),
    "policy/learning_rate": Metric(
        "number", "Learning rate of the policy in this step; 0 while only the critic learns."
    ),
    "policy/updates": Metric("updates", "Optimizer updates of the policy."),
    "kl/reference": Metric("nats per token", "KL(new ‖ reference), k3 estimate, mean per token."),
    "mismatch/mean_exp_abs": Metric(
        "number",
        "exp|trainer − sampler| of log-probabilities, mean; healthy under 1.05. At equal weights, except with `async`:"
        " then staleness is in it, and in all of `mismatch`.",
    ),
    "mismatch/k3": Metric(
        "nats per token", "KL(sampler ‖ trainer), k3 estimate; healthy under 0.001 at equal weights."
    ),
    "mismatch/ratio_mean": Metric("number", "Importance weight exp(trainer − sampler) before truncation, mean."),
    "mismatch/ratio_min": Metric("number", "The same, least."),
    "mismatch/ratio_max": Metric("number", "The same, greatest."),
    "mismatch/corrected_fraction_low": Metric(
        "share", "Share of tokens whose importance weight was truncated or masked as too low."
    ),
    "mismatch/corrected_fraction_high": Metric(
        "share", "Share of tokens whose importance weight was truncated or masked as too high."
    ),
    "mismatch/rejected_fraction": Metric(
        "share", "Share of tokens that `importanceSampling.rejection` left out of the policy's loss."
    ),
    "advantage/mean": Metric("reward", "Advantage as the loss uses it, mean per token."),
    "advantage/std": Metric("reward", "The same, standard deviation."),
    "advantage/min": Metric("reward", "The same, least."),
    "advantage/max": Metric("reward", "The same, greatest."),
    "value/loss": Metric("number", "Loss of the critic, mean over the step's optimizer updates."),
    "value/mean": Metric("reward", "The critic's values, mean per token."),
    "value/std": Metric("reward", "The same, standard deviation."),
    "value/min": Metric("reward", "The same, least."),
    "value/max": Metric("reward", "The same, greatest."),
    "value/error": Metric("reward", "Return − value, mean per token."),
    "value/clip_fraction": Metric("share", "Share of values that moved further than the value clip."),
    "value/explained_variance": Metric("number", "1 − Var(return − value) / Var(return); 1 is a perfect critic."),
    "value/gradient_norm": Metric(
        "number", "Global norm of the critic's gradient before clipping, mean over the updates."
    ),
    "return/mean": Metric("reward", "Targets of the critic, mean per token."),
    "return/std": Metric("reward", "The same, standard deviation."),
    "return/min": Metric("reward", "The same, least."),
    "return/max": Metric("reward", "The same, greatest."),
    "lengths/mean": Metric("tokens", "Response tokens of the batch's samples, EOS included, mean."),
    "lengths/max": Metric("tokens", "The same, greatest."),
    "batch/samples": Metric("samples", "Samples of the batch."),
    "batch/masked_samples": Metric("samples", "Samples left out of the loss: unscorable, or truncated and masked."),
    "batch/zero_variance_groups": Metric(
        "groups", "Groups with equal rewards: they teach nothing where the baseline is the group."
    ),
    "batch/teaching_groups": Metric(
        "groups",
        "Groups that say what to do otherwise: with different rewards where the samples of a group are compared, and"
        " anything in the loss. At 0 a penalty or a bonus is all that the step can have learnt from.",
    ),
    "weights/bytes": Metric("bytes", "Bytes of the published version: with an adapter, of the adapter alone."),
    "weights/delta_bytes": Metric(
        "bytes",
        "Bytes of what changed since the version before, where that is published beside it: with an object store.",
    ),
    "weights/full_bytes": Metric("bytes", "Bytes that all of the model's weights have in the published format."),
    "tokens": Metric("tokens", "Prompt and response tokens that learning passed through the model."),
    "tokens/shared": Metric(
        "tokens", "Prompt tokens that it did not, since samples of a group were passed with one prompt."
    ),
    "learning/threads": Metric("threads", "CPU threads of a learning instance; `rlhfless replay` takes as many."),
    "seconds": Metric("seconds", "The whole request."),
    "seconds/load": Metric("seconds", "Loading models and checkpoint, where they were not in memory."),
    "seconds/wake": Metric(
        "seconds", "Moving weights and optimizer state to the device, where they had left it to others."
    ),
    "seconds/replay": Metric("seconds", "Taking steps again that were lost with another learner."),
    "seconds/train": Metric("seconds", "The step itself."),
    "seconds/wait": Metric(
        "seconds", "Of a batch that was still being prepared: the time in which there was nothing to learn from."
    ),
    "seconds/publish": Metric("seconds", "Publishing weights and checkpoint."),
}
"""What learning reports. Which of them a step has depends on the algorithm."""
