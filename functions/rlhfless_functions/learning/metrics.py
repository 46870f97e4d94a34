"""Every metric of the learning stage, by the names that users of these methods look for."""

import statistics

from rlhfless_functions.learning.batch import TrainingBatch
from rlhfless_functions.learning.step_report import StepReport

METRICS: dict[str, str] = {
    "policy/loss": "Loss of the policy, mean over the step's optimizer updates.",
    "policy/entropy": "Entropy of the policy's distributions at the sampling temperature, mean per token, in nats.",
    "policy/kl": "KL(old ‖ new) within the step, k3 estimate, mean per token, in nats.",
    "policy/clip_fraction_low": "Share of tokens (or samples) whose gradient the lower bound of the ratio cut off.",
    "policy/clip_fraction_high": "Share of tokens (or samples) whose gradient the upper bound of the ratio cut off.",
    "policy/ratio_mean": "Importance ratio new / old, mean.",
    "policy/ratio_min": "Importance ratio new / old, least.",
    "policy/ratio_max": "Importance ratio new / old, greatest.",
    "policy/gradient_norm": "Global norm of the policy's gradient before clipping, mean over the updates.",
    "policy/gradient_norm_max": "The same, greatest.",
    "policy/learning_rate": "Learning rate of the policy in this step; 0 while only the critic learns.",
    "policy/updates": "Optimizer updates of the policy.",
    "kl/reference": "KL(new ‖ reference), k3 estimate, mean per token, in nats.",
    "mismatch/mean_exp_abs": "exp|trainer − sampler| of log-probabilities at equal weights, mean; healthy under 1.05.",
    "mismatch/k3": "KL(sampler ‖ trainer) at equal weights, k3 estimate; healthy under 0.001.",
    "mismatch/ratio_mean": "Importance weight exp(trainer − sampler) before truncation, mean.",
    "mismatch/ratio_min": "The same, least.",
    "mismatch/ratio_max": "The same, greatest.",
    "advantage/mean": "Advantage as the loss uses it, mean per token.",
    "advantage/std": "The same, standard deviation.",
    "advantage/min": "The same, least.",
    "advantage/max": "The same, greatest.",
    "value/loss": "Loss of the critic, mean over the step's optimizer updates.",
    "value/mean": "The critic's values, mean per token.",
    "value/std": "The same, standard deviation.",
    "value/min": "The same, least.",
    "value/max": "The same, greatest.",
    "value/error": "Return − value, mean per token.",
    "value/clip_fraction": "Share of values that moved further than the value clip.",
    "value/explained_variance": "1 − Var(return − value) / Var(return); 1 is a perfect critic.",
    "value/gradient_norm": "Global norm of the critic's gradient before clipping, mean over the updates.",
    "return/mean": "Targets of the critic, mean per token.",
    "return/std": "The same, standard deviation.",
    "return/min": "The same, least.",
    "return/max": "The same, greatest.",
    "lengths/mean": "Response tokens of the batch's samples, EOS included, mean.",
    "lengths/max": "The same, greatest.",
    "batch/samples": "Samples of the batch.",
    "batch/masked_samples": "Samples left out of the loss: unscorable, or truncated and masked.",
    "batch/zero_variance_groups": "Groups with equal rewards: they teach nothing where the baseline is the group.",
    "weights/bytes": "Bytes of the published version: with an adapter, of the adapter alone.",
    "weights/full_bytes": "Bytes that all of the model's weights have in the published format.",
    "tokens": "Prompt and response tokens that learning passed through the model.",
    "tokens/shared": "Prompt tokens that it did not, since samples of a group were passed with one prompt.",
    "seconds": "The whole request.",
    "seconds/load": "Loading models and checkpoint, where they were not in memory.",
    "seconds/wake": "Moving weights and optimizer state to the device, where they had left it to others.",
    "seconds/replay": "Taking steps again that were lost with another learner.",
    "seconds/train": "The step itself.",
    "seconds/wait": "Of a batch that was still being prepared: the time in which there was nothing to learn from.",
    "seconds/publish": "Publishing weights and checkpoint.",
}
"""Name and meaning. Which of them a step has depends on the algorithm."""

_NAMES = {
    "entropy": "policy/entropy",
    "approx_kl": "policy/kl",
    "clip_low": "policy/clip_fraction_low",
    "clip_high": "policy/clip_fraction_high",
    "ratio": "policy/ratio_mean",
    "ratio_min": "policy/ratio_min",
    "ratio_max": "policy/ratio_max",
    "kl": "kl/reference",
    "sampler_mismatch": "mismatch/mean_exp_abs",
    "sampler_kl": "mismatch/k3",
    "sampler_ratio": "mismatch/ratio_mean",
    "sampler_ratio_min": "mismatch/ratio_min",
    "sampler_ratio_max": "mismatch/ratio_max",
    "value_error": "value/error",
    "value_clip": "value/clip_fraction",
    "explained_variance": "value/explained_variance",
} | {
    f"{quantity}{suffix}": f"{quantity}/{suffix.lstrip('_') or 'mean'}"
    for quantity in ("advantage", "value", "return")
    for suffix in ("", "_std", "_min", "_max")
}


def step_metrics(report: StepReport, batch: TrainingBatch) -> dict[str, float]:
    """A step's metrics but for its seconds; keys are those of `METRICS`."""
    metrics = {_NAMES[name]: value for name, value in report.summary().items() if name in _NAMES}
    for prefix, course in (("policy", report.policy), ("value", report.critic)):
        if course.losses:
            metrics[f"{prefix}/loss"] = statistics.fmean(course.losses)
            metrics[f"{prefix}/gradient_norm"] = statistics.fmean(course.gradient_norms)
    if report.policy.gradient_norms:
        metrics["policy/gradient_norm_max"] = max(report.policy.gradient_norms)
    groups: dict[int, set[float | None]] = {}
    for sample in batch.samples:
        groups.setdefault(sample.prompt, set()).add(sample.reward)
    return metrics | {
        "policy/learning_rate": report.learning_rate,
        "policy/updates": float(len(report.policy.losses)),
        "lengths/mean": statistics.fmean(batch.lengths),
        "lengths/max": float(max(batch.lengths)),
        "batch/samples": float(len(batch.samples)),
        "batch/masked_samples": float(sum(not sample.mask for sample in batch.samples)),
        "batch/zero_variance_groups": float(sum(len(rewards) == 1 for rewards in groups.values())),
        "tokens": float(report.tokens),
        "tokens/shared": float(report.shared_tokens),
    }
