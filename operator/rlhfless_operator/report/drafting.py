"""The report's section on drafting: its gain and its cost."""

from rlhfless_operator.formatting import format_number, format_percent
from rlhfless_operator.report.learning import metric_chart
from rlhfless_operator.report.run import Run

_CHARTS = (
    (
        (("generation/tokens_per_pass", "tokens"),),
        "Tokens a pass",
        "Tokens of a sequence per decode pass, mean; 1 without drafts.",
    ),
    (
        (("generation/drafts/tried", "tried"), ("generation/drafts/accepted", "accepted")),
        "Drafted tokens",
        "Verified drafted tokens, and those that would have been sampled anyway.",
    ),
    (
        (("generation/drafts/seconds", "looking for drafts"), ("generation/seconds", "generation")),
        "Seconds of drafting",
        "Time to look up drafts, over all instances, next to the time of generation.",
    ),
)


def section(run: Run) -> str:
    """Return the tokens per pass, drafts and their time, by step; empty for a run without drafts."""
    tried = sum(record.metrics.get("generation/drafts/tried", 0.0) for record in run.trained)
    if not tried:
        return ""
    accepted = sum(record.metrics.get("generation/drafts/accepted", 0.0) for record in run.trained)
    unreadable = sum(record.metrics.get("generation/drafts/unreadable", 0.0) for record in run.trained)
    text = (
        f"{format_percent(accepted / tried)} of {format_number(tried)} drafted tokens would have been sampled anyway"
        " and were kept. The samples are those of a run without drafting."
    )
    if unreadable:
        text += f" Responses of earlier steps could not be read {format_number(unreadable)} times: see the logs."
    figures = "".join(metric_chart(run, *chart) for chart in _CHARTS)
    return f'<p>{text}</p><div class="charts">{figures}</div>'
