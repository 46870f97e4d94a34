"""The figures for the metrics: pure functions of a run's records."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from rlhfless_operator.records.record import StepRecord

RESPONSE_TOKENS: tuple[Literal["mean", "p95", "max"], ...] = ("mean", "p95", "max")
"""Statistics of response lengths."""

_TRAINING = {
    "kl": ("kl/reference", "policy/kl"),
    "entropy": ("policy/entropy",),
    "grad_norm": ("policy/gradient_norm",),
    "loss": ("policy/loss",),
    "mismatch": ("mismatch/mean_exp_abs",),
    "tokens_per_pass": ("generation/tokens_per_pass",),
}
"""Names in `metrics.jsonl`; the first that exists counts."""
_CLIPPED = ("policy/clip_fraction_low", "policy/clip_fraction_high")


def training_figures(record: StepRecord) -> dict[str, float]:
    """Return a step's figures of learning and sampling, by the names that dashboards use."""
    figures = {}
    for name, sources in _TRAINING.items():
        found = next((record.metrics[source] for source in sources if source in record.metrics), None)
        if found is not None:
            figures[name] = found
    if any(name in record.metrics for name in _CLIPPED):
        figures["clip_fraction"] = sum(record.metrics.get(name, 0.0) for name in _CLIPPED)
    return figures


def planned_money(record: StepRecord, instance_hour: Decimal) -> dict[str, float]:
    """Return the planned cost of generation: of the chosen plan, the cheapest plan, and the lower bound.

    Args:
        instance_hour: price of a generation instance for an hour.
    """
    plan = record.plan or {}
    names = {
        "chosen": "expected_instance_seconds",
        "cheapest": "cheapest_instance_seconds",
        "bound": "lower_bound_instance_seconds",
    }
    return {
        kind: plan[name] * float(instance_hour) / 3600 for kind, name in names.items() if plan.get(name) is not None
    }


def response_tokens(lengths: Sequence[int]) -> tuple[float, float, float]:
    """Return the mean, 95th percentile (nearest rank) and maximum of at least one length."""
    ordered = sorted(lengths)
    return sum(ordered) / len(ordered), float(ordered[math.ceil(0.95 * len(ordered)) - 1]), float(ordered[-1])
