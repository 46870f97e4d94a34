"""The report's charts of what was foreseen, beside what came, and of what was made ahead."""

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
        "As planned when the step began, and as they were.",
    ),
    (
        (("planning/lower_bound_share", "share"),),
        "Share of the lower bound",
        "Least instance-seconds of generation that anyone could have needed in the same time, over what was held.",
    ),
    (
        (("generation/staleness", "versions"),),
        "Staleness",
        "Versions between the weights that sampled a step's groups and those that the step started from.",
    ),
)


def charts(run: Run) -> str:
    """Length prediction, the plan's forecast, how close to the lower bound the run came, and staleness: those that it
    has."""
    figures = [
        metric_chart(run, names, title, note)
        for names, title, note in _CHARTS
        if any(name in record.metrics for record in run.trained for name, _ in names)
    ]
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""
