"""The report's section on data: the counts of rows, and settings that changed during the run."""

from html import escape

from rlhfless_operator.records.status import DataStatus
from rlhfless_operator.report.run import Run

_COLUMNS = {
    "rows": "rows",
    "prompts": "prompts",
    "too_long": "dropped: longer than sampling.maxPromptTokens",
    "empty": "left out: empty",
    "answered": "dropped: ends with the assistant's message",
    "without_ground_truth": "without ground truth",
}


def section(run: Run) -> str:
    """Return a table of each dataset's counts of rows, and a list of changed settings; empty if neither is known."""
    return _datasets(run) + _changes(run)


def _datasets(run: Run) -> str:
    given = {"training": run.status.get("data"), "evaluation": run.status.get("evaluationData")}
    known = {name: DataStatus.model_validate(content) for name, content in given.items() if content}
    if not known:
        return ""
    # Reasons without rows get no column.
    shown = [
        name for name in _COLUMNS if name in ("rows", "prompts") or any(getattr(data, name) for data in known.values())
    ]
    head = "".join(f'<th class="n">{escape(_COLUMNS[name])}</th>' for name in shown)
    rows = "".join(
        f"<tr><td>{escape(purpose)}</td>"
        + "".join(f'<td class="n">{getattr(data, name)}</td>' for name in shown)
        + "</tr>"
        for purpose, data in known.items()
    )
    return f'<div class="card"><div class="scroll"><table><tr><th>dataset</th>{head}</tr>{rows}</table></div></div>'


def _changes(run: Run) -> str:
    items = "".join(
        f"<li>From step {step} on: {escape(', '.join(changes))}</li>"
        for step, changes in run.settings.changes()
        if changes
    )
    items += "".join(
        f"<li>From step {change.from_step} on: {escape(', '.join(change.inputs))}</li>" for change in run.inputs
    )
    return f"<p>Settings and files that changed during the run:</p><ul>{items}</ul>" if items else ""
