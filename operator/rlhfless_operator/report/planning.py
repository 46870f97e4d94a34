"""The report's charts of planning: forecasts and actual values, steps generated ahead, and learning instances."""

from html import escape

from rlhfless_operator.report.learning import metric_chart
from rlhfless_operator.report.run import Run

_CHARTS = (
    (
        (("prediction/rank_correlation", "samples"), ("prediction/prompt_rank_correlation", "prompts")),
        "Predicted lengths: rank correlation",
        "Spearman's ρ between predicted and actual lengths; 1 is the right order.",
    ),
    (
        (("prediction/relative_error", "error"), ("prediction/bias", "bias")),
        "Predicted lengths: error",
        "Mean of |predicted − actual| over actual; and all predicted over all actual tokens, less 1.",
    ),
    (
        (("planning/expected_seconds", "planned"), ("generation/seconds", "actual")),
        "Seconds of generation",
        "Planned at the beginning of the step, and actual.",
    ),
    (
        (("planning/lower_bound_share", "share"),),
        "Share of the lower bound",
        "Lowest possible instance-seconds of generation in the same time, divided by the held ones.",
    ),
    (
        (("generation/staleness", "versions"),),
        "Staleness",
        "Versions between the weights that sampled a step's groups and those that the step started from.",
    ),
    (
        (("learning/instances_chosen", "chosen"), ("learning/instances", "took the step")),
        "Learning instances",
        "Chosen by the plan, and taking the step: fewer if one was lost or did not start.",
    ),
)


def section(run: Run) -> str:
    """Return charts of length prediction, the plan's forecast, the lower bound's share, staleness and learning
    instances, if the run has them."""
    chosen = any("learning/instances_chosen" in record.metrics for record in run.trained)
    figures = [
        metric_chart(run, names, title, note)
        for names, title, note in _CHARTS
        if any(name in record.metrics for record in run.trained for name, _ in names)
        # If the plan had no choice, every step has the same number.
        and (chosen or names[0][0] != "learning/instances_chosen")
    ]
    charts = f'<div class="charts">{"".join(figures)}</div>' if figures else ""
    return charts + _preparers(run) + _learners(run) + _held_steps(run) + _prefixes(run)


def _preparers(run: Run) -> str:
    """Return a sentence on the number of instances that prepared the newest step's groups, with the plan's reason."""
    newest = run.trained[-1] if run.trained else None
    if newest is None or newest.plan is None or not newest.plan.get("preparers_reason"):
        return ""
    count = int(newest.plan["preparers"])
    instances = "1 instance prepared" if count == 1 else f"{count} instances prepared"
    return f"<p>In step {newest.step}, {instances}: {escape(str(newest.plan['preparers_reason']))}.</p>"


def _learners(run: Run) -> str:
    """Return a sentence on the number of instances that learn together, with the reason for the newest choice."""
    newest = run.status.get("learners")
    if not newest:
        return ""
    count = int(newest["instances"])
    instances = "1 instance learns" if count == 1 else f"{count} instances learn together"
    return f"<p>From step {int(newest['step'])} on {instances}: {escape(str(newest['reason']))}.</p>"


def _held_steps(run: Run) -> str:
    """Return a sentence on the steps whose instances all stayed, with the reason in the newest of them."""
    held = [record for record in run.trained if record.plan and record.plan.get("holds")]
    if not held:
        return ""
    reason = escape(str(held[-1].plan["holds_reason"])) if held[-1].plan else ""
    return (
        f"<p>In {len(held)} of {len(run.trained)} steps the instances of all stages stayed for the whole step. In step"
        f" {held[-1].step}, {reason}.</p>"
    )


def _prefixes(run: Run) -> str:
    """Return a sentence on whether instances can share prefixes of prompts, with the reason in the newest step's
    plan."""
    plans = [record.plan for record in run.trained if record.plan]
    reason = plans[-1].get("prefixes") if plans else None
    return f"<p>Instances share prefixes of prompts: {escape(str(reason))}.</p>" if reason else ""
