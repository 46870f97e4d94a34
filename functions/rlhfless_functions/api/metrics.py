"""The metrics that the functions report: names, units and meanings. Tests compare them with what jobs write.

A name in angle brackets is a name from the job: `<reward>` is the name of a reward.
"""

from dataclasses import dataclass
from typing import Literal

Unit = Literal[
    "number", "share", "reward", "nats per token", "tokens", "samples", "groups", "updates", "bytes", "seconds",
    "instance-seconds", "instances", "requests", "versions", "threads",
]  # fmt: skip
"""`share` is from 0 to 1; `number` has no unit; `reward` is in units of the rewards' weighted sum."""


@dataclass(frozen=True)
class Metric:
    """The unit and the meaning of a step's metric."""

    unit: Unit
    meaning: str
    """A sentence."""


ENDINGS = {
    "answered": "in which the model's last turn called no tool",
    "finished": "that the environment ended",
    "maxTurns": "that reached `environment.maxTurns`",
    "maxTokens": "that reached `sampling.maxResponseTokens`",
    "toolSeconds": "in which a call exceeded `environment.toolSeconds`",
    "episodeSeconds": "whose calls exceeded `environment.episodeSeconds`",
    "failed": "whose environment raised, ended its process, or exceeded its memory",
}
"""Ways in which an episode ends, as the ends of a sentence that begins with "episodes"."""
TOOL_ERRORS = {
    "unparsed": "that could not be read",
    "unknown_tool": "of a tool that there is not",
    "wrong_arguments": "with wrong arguments",
    "raised": "that raised",
}
"""Kinds of failed calls of tools, as the ends of a sentence that begins with "calls"."""

PREPARATION_METRICS: dict[str, Metric] = {
    "reward": Metric("reward", "Weighted sum of the reward terms, mean over the scored samples."),
    "reward/std": Metric("reward", "Weighted sum of the reward terms, standard deviation over the scored samples."),
    "reward/unscorable": Metric("samples", "Samples without a reward."),
    "reward/<reward>": Metric("number", "A term's value before weighting, mean over the samples that it scored."),
    "reward/<reward>/unscorable": Metric("samples", "Samples that the term did not score."),
    "reward/<reward>/errors": Metric("groups", "Groups for which the reward failed."),
    "reward/<reward>/timed_out": Metric(
        "share", "Share of the reward's checks of a response that took too long and were ended."
    ),
    "reward/<reward>/out_of_memory": Metric(
        "share", "Share of the reward's checks of a response that reached its limit of memory."
    ),
    "reward/<reward>/crashed": Metric(
        "share", "Share of the reward's checks of a response whose process was killed, ended itself or wrote too much."
    ),
    "reward/<reward>/<logged>": Metric("number", "Value that the reward's function logged with `log_metric`, mean."),
    "groups": Metric("groups", "Prepared groups, including those that were replaced."),
    "zero_variance_groups": Metric(
        "groups",
        "Prepared groups with equal rewards: there is nothing to learn from them if the group is the baseline.",
    ),
    "lengths": Metric("tokens", "Response tokens of the prepared samples, EOS included, mean."),
    "prompt_lengths": Metric("tokens", "Tokens of the prepared groups' prompts, mean."),
    "truncated": Metric("share", "Responses that reached the length limit."),
    "masked": Metric("samples", "Samples excluded from the loss: unscorable, or truncated and masked."),
    "values": Metric("reward", "The critic's values in preparation, mean per token; not with `async`."),
    "environment/turns": Metric("number", "Turns of the model in an episode, mean."),
    "environment/given": Metric("tokens", "Mean number of tokens that an environment gives in an episode."),
    "environment/seconds_away": Metric(
        "seconds", "Time that a sample waited for its environment, mean of the episodes."
    ),
    **{f"environment/ended/{name}": Metric("share", f"Episodes {said}.") for name, said in ENDINGS.items()},
    **{f"environment/errors/{name}": Metric("number", f"Calls {said}.") for name, said in TOOL_ERRORS.items()},
    "environment/restarted": Metric("number", "Times that an episode began anew because its environment was lost."),
    "environment/dropped": Metric("samples", "Samples that no reward scored because their environment failed."),
    "seconds/rewards": Metric("seconds", "Preparation's time for rewards, over all chunks."),
    "seconds/models": Metric("seconds", "Preparation's time for models, over all chunks; it overlaps with rewards."),
}
"""Metrics of preparation, for a step's samples and an evaluation's. The control plane adds chunks up: the mean `X` is
`X/sum` divided by `X/count`."""

LEARNING_METRICS: dict[str, Metric] = {
    "policy/loss": Metric("number", "Loss of the policy, mean over the step's optimizer updates."),
    "policy/entropy": Metric(
        "nats per token", "Entropy of the policy's distributions at the sampling temperature, mean per token."
    ),
    "policy/kl": Metric("nats per token", "KL(old ‖ new) within the step, k3 estimate, mean per token."),
    "policy/clip_fraction_low": Metric(
        "share", "Share of tokens (or samples) whose gradient the ratio's lower bound clipped."
    ),
    "policy/clip_fraction_high": Metric(
        "share", "Share of tokens (or samples) whose gradient the ratio's upper bound clipped."
    ),
    "policy/ratio_mean": Metric("number", "Importance ratio new / proximal policy (`proximalPolicy`), mean."),
    "policy/ratio_min": Metric("number", "Importance ratio new / old, minimum."),
    "policy/ratio_max": Metric("number", "Importance ratio new / old, maximum."),
    "policy/gradient_norm": Metric(
        "number", "Global norm of the policy's gradient before clipping, mean over the updates."
    ),
    "policy/gradient_norm_max": Metric("number", "Global norm of the policy's gradient before clipping, maximum."),
    "policy/learning_rate": Metric(
        "number", "Learning rate of the policy in this step; 0 while only the critic learns."
    ),
    "policy/updates": Metric("updates", "Optimizer updates of the policy."),
    "kl/reference": Metric("nats per token", "KL(new ‖ reference), k3 estimate, mean per token."),
    "mismatch/mean_exp_abs": Metric(
        "number",
        "exp|trainer − sampler| of log-probabilities at equal weights, mean; healthy under 1.05. With `async`, all of"
        " `mismatch` includes the effect of staleness.",
    ),
    "mismatch/k3": Metric(
        "nats per token", "KL(sampler ‖ trainer), k3 estimate; healthy under 0.001 at equal weights."
    ),
    "mismatch/ratio_mean": Metric("number", "Importance weight exp(trainer − sampler) before truncation, mean."),
    "mismatch/ratio_min": Metric("number", "Importance weight before truncation, minimum."),
    "mismatch/ratio_max": Metric("number", "Importance weight before truncation, maximum."),
    "mismatch/corrected_fraction_low": Metric(
        "share", "Share of tokens whose importance weight was truncated or masked as too low."
    ),
    "mismatch/corrected_fraction_high": Metric(
        "share", "Share of tokens whose importance weight was truncated or masked as too high."
    ),
    "mismatch/rejected_fraction": Metric(
        "share", "Share of tokens that `importanceSampling.rejection` excluded from the policy's loss."
    ),
    "advantage/mean": Metric("reward", "Advantage as the loss uses it, mean per token."),
    "advantage/std": Metric("reward", "Advantage, standard deviation."),
    "advantage/min": Metric("reward", "Advantage, minimum."),
    "advantage/max": Metric("reward", "Advantage, maximum."),
    "value/loss": Metric("number", "Loss of the critic, mean over the step's optimizer updates."),
    "value/mean": Metric("reward", "The critic's values, mean per token."),
    "value/std": Metric("reward", "The critic's values, standard deviation."),
    "value/min": Metric("reward", "The critic's values, minimum."),
    "value/max": Metric("reward", "The critic's values, maximum."),
    "value/error": Metric("reward", "Return − value, mean per token."),
    "value/clip_fraction": Metric("share", "Share of values that moved by more than the value clip."),
    "value/explained_variance": Metric("number", "1 − Var(return − value) / Var(return); 1 is a perfect critic."),
    "value/gradient_norm": Metric(
        "number", "Global norm of the critic's gradient before clipping, mean over the updates."
    ),
    "return/mean": Metric("reward", "Targets of the critic, mean per token."),
    "return/std": Metric("reward", "Targets of the critic, standard deviation."),
    "return/min": Metric("reward", "Targets of the critic, minimum."),
    "return/max": Metric("reward", "Targets of the critic, maximum."),
    "lengths/mean": Metric("tokens", "Response tokens of the batch's samples, EOS included, mean."),
    "lengths/max": Metric("tokens", "Response tokens of the batch's samples, EOS included, maximum."),
    "batch/samples": Metric("samples", "Samples of the batch."),
    "batch/masked_samples": Metric("samples", "Samples excluded from the loss: unscorable, or truncated and masked."),
    "batch/zero_variance_groups": Metric(
        "groups", "Groups with equal rewards: there is nothing to learn from them if the group is the baseline."
    ),
    "batch/teaching_groups": Metric(
        "groups",
        "Groups to learn from: those with a sample in the loss and, if the samples of a group are compared, with"
        " different rewards. If it is 0, the step learnt at most from a penalty or a bonus.",
    ),
    "weights/bytes": Metric("bytes", "Size of the published version; with LoRA, of the adapter only."),
    "weights/delta_bytes": Metric(
        "bytes", "Size of what changed since the previous version, if it is published beside it (object stores only)."
    ),
    "weights/full_bytes": Metric("bytes", "Size of all of the model's weights in the published format."),
    "tokens": Metric("tokens", "Prompt and response tokens that learning processed."),
    "tokens/shared": Metric(
        "tokens", "Prompt tokens that learning skipped, because samples of a group shared one prompt."
    ),
    "learning/threads": Metric(
        "threads", "CPU threads of a learning instance; `rlhfless replay` uses the same number."
    ),
    "seconds": Metric("seconds", "The whole request."),
    "seconds/load": Metric("seconds", "Loading models and checkpoint, if they were not in memory."),
    "seconds/wake": Metric("seconds", "Moving weights and optimizer state back to the device after a sleep."),
    "seconds/taken_up": Metric("seconds", "Loading and repeating beside generation, before the batch was there."),
    "seconds/replay": Metric("seconds", "Repeating steps that were lost with an earlier learner."),
    "seconds/train": Metric("seconds", "The step itself; with `async`, also the critic's values of its samples."),
    "seconds/wait": Metric("seconds", "Waiting for samples of a batch that was still being prepared."),
    "seconds/publish": Metric("seconds", "Publishing weights, with a checkpoint if the learner writes that with them."),
    "seconds/checkpoint": Metric(
        "seconds", "Writing the checkpoint of the step before, beside the generation of this one."
    ),
    "seconds/checkpoint_wait": Metric("seconds", "How long that kept the learner from this step."),
    "seconds/publish_wait": Metric(
        "seconds",
        "How long publishing kept the learner from the next step: copying weights to the host's memory, and waiting"
        " until the version before was published. Only where it publishes beside the next step.",
    ),
}
"""Metrics of learning. A step has those of its algorithm."""
