"""The metrics of the learning stage, by the names that users of these methods look for (`api.metrics`)."""

import statistics

from rlhfless_functions.learning.batch import TrainingBatch
from rlhfless_functions.learning.step_report import StepReport
from rlhfless_functions.settings import AlgorithmSettings

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
    "correction_low": "mismatch/corrected_fraction_low",
    "correction_high": "mismatch/corrected_fraction_high",
    "rejected": "mismatch/rejected_fraction",
    "value_error": "value/error",
    "value_clip": "value/clip_fraction",
    "explained_variance": "value/explained_variance",
} | {
    f"{quantity}{suffix}": f"{quantity}/{suffix.lstrip('_') or 'mean'}"
    for quantity in ("advantage", "value", "return")
    for suffix in ("", "_std", "_min", "_max")
}


def step_metrics(report: StepReport, batch: TrainingBatch, algorithm: AlgorithmSettings) -> dict[str, float]:
    """Return a step's metrics without its seconds; keys are those of `LEARNING_METRICS`."""
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
        "lengths/mean": statistics.fmean(batch.sampled),
        "lengths/max": float(max(batch.sampled)),
        "batch/samples": float(len(batch.samples)),
        "batch/masked_samples": float(sum(not sample.mask for sample in batch.samples)),
        "batch/zero_variance_groups": float(sum(len(rewards) == 1 for rewards in groups.values())),
        "batch/teaching_groups": float(_teaching_groups(metrics, batch, algorithm)),
        "tokens": float(report.tokens),
        "tokens/shared": float(report.shared_tokens),
    }


def _teaching_groups(metrics: dict[str, float], batch: TrainingBatch, algorithm: AlgorithmSettings) -> int:
    advantage = algorithm.resolved().advantage
    rewards: dict[int, set[float]] = {}
    in_loss: set[int] = set()
    for sample in batch.samples:
        if sample.reward is not None:
            rewards.setdefault(sample.prompt, set()).add(sample.reward)
        if sample.mask:
            in_loss.add(sample.prompt)
    if advantage in ("group", "leave_one_out"):
        # With a penalty in the reward, equal rewards have advantages too. These teach only the penalty.
        return sum(len(found) > 1 and prompt in in_loss for prompt, found in rewards.items())
    if advantage != "gae" and metrics.get("advantage/min") == metrics.get("advantage/max") == 0:
        return 0
    return len(in_loss)
