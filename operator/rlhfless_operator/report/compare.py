"""Compare several runs: the differences of their jobs, and their results."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.table import Table

from rlhfless_functions import artifacts
from rlhfless_operator.console import PlainConsole
from rlhfless_operator.formatting import format_clock, format_money, format_percent, sparkline
from rlhfless_operator.report.charts import Series, line_chart
from rlhfless_operator.report.learning import smoothed
from rlhfless_operator.report.page import page
from rlhfless_operator.report.run import Run, read_run

_SPARK_WIDTH = 24
_ABSENT = "–"


def compare(run_folders: Sequence[str], width: int = 120) -> str:
    """Return a table for the terminal, with one column for each run.

    Args:
        run_folders: paths or fsspec URIs of job folders.
        width: number of characters in a line of the terminal.

    Raises:
        ValueError: a folder holds no run, or a file in it is damaged.
    """
    runs = [read_run(folder) for folder in run_folders]
    table = Table(header_style="bold", pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(run.name, overflow="fold")
    for label, values in results(runs):
        table.add_row(label, *values)
    curves = [sparkline([record.metric("reward") for record in run.trained], _SPARK_WIDTH) for run in runs]
    if any(curves):
        table.add_row("reward by step", *curves)
    table.add_section()
    for field, values in differences(runs):
        table.add_row(field, *values)
    buffer = io.StringIO()
    PlainConsole(file=buffer, width=width, color_system=None).print(table)
    return buffer.getvalue()


def write_comparison(run_folders: Sequence[str], uri: str) -> str:
    """Write the comparison as one self-contained page.

    Args:
        run_folders: paths or fsspec URIs of job folders.
        uri: URI or path of the page.

    Returns:
        `uri`.

    Raises:
        ValueError: if a folder holds no run, or a file in it is damaged.
    """
    runs = [read_run(folder) for folder in run_folders]
    artifacts.write_bytes(uri, comparison_page(runs).encode())
    return uri


def comparison_page(runs: Sequence[Run]) -> str:
    """Return the page: results, differences between the jobs, and curves on common axes."""
    names = _distinct_names(runs)
    head = "<tr><th></th>" + "".join(f'<th class="n">{escape(name)}</th>' for name in names) + "</tr>"
    tables = "".join(
        f'<section><h2>{title}</h2><div class="card scroll"><table>{head}{_html_rows(rows)}</table></div></section>'
        for title, rows in (("Results", results(runs)), ("Differences of the jobs", differences(runs)))
        if rows
    )
    charts = "".join(
        _overlay(runs, names, metric, title)
        for metric, title in (
            ("reward", "Reward, smoothed"),
            ("kl/reference", "KL to the reference"),
            ("lengths/mean", "Mean response length"),
            ("policy/entropy", "Entropy"),
        )
        if any(metric in record.metrics for run in runs for record in run.trained)
    )
    title = " and ".join(names)
    courses = f'<section><h2>Courses</h2><div class="charts">{charts}</div></section>' if charts else ""
    return page(f"{title} – rlhfless", f"<h1>{escape(title)}</h1>{tables}{courses}")


def results(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the results: (label, one text for each run)."""
    held_out = [run.held_out_rewards for run in runs]
    rows = [
        ("algorithm", [run.algorithm for run in runs]),
        ("steps", [str(len(run.trained)) for run in runs]),
        ("held-out reward before", [_number(held[0][1] if held else None) for held in held_out]),
        ("held-out reward after", [_number(held[-1][1] if len(held) > 1 else None) for held in held_out]),
        ("reward, first step", [_number(run.trained[0].metric("reward") if run.trained else None) for run in runs]),
        ("reward, last step", [_number(run.trained[-1].metric("reward") if run.trained else None) for run in runs]),
        ("time", [format_clock(run.seconds) for run in runs]),
        ("instance time", [format_clock(run.instance_seconds) for run in runs]),
        ("busy share", [_busy_share(run) for run in runs]),
        ("cost", [format_money(run.cost, run.currency) for run in runs]),
    ]
    return [(label, values) for label, values in rows if any(value != _ABSENT for value in values)]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the fields of the jobs' `spec` that differ: (field, one text for each run)."""
    flat = [_flat(run.spec) for run in runs]
    fields = sorted({field for fields in flat for field in fields})
    rows = [(field, [fields.get(field, _ABSENT) for fields in flat]) for field in fields]
    return [(field, values) for field, values in rows if len(set(values)) > 1]


def _flat(value: Any, path: str = "") -> dict[str, str]:
    """Return every leaf with its dotted path, as JSON."""
    children: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        children = {f"{path}.{key}" if path else str(key): child for key, child in value.items()}
    elif isinstance(value, list) and any(isinstance(child, Mapping) for child in value):
        children = {f"{path}[{index}]": child for index, child in enumerate(value)}
    elif path:
        return {path: value if isinstance(value, str) else json.dumps(value, default=str)}
    return {leaf: text for name, child in children.items() for leaf, text in _flat(child, name).items()}


def _distinct_names(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, start=1)]


def _html_rows(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    return "".join(
        f"<tr><td>{escape(label)}</td>" + "".join(f'<td class="n">{escape(value)}</td>' for value in values) + "</tr>"
        for label, values in rows
    )


def _overlay(runs: Sequence[Run], names: Sequence[str], metric: str, title: str) -> str:
    xs = sorted({record.step for run in runs for record in run.trained})
    series = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        by_step = {record.step: record.metric(metric) for record in run.trained}
        values = [by_step.get(step, math.nan) for step in xs]
        course = smoothed(values) if metric == "reward" else values
        series.append(Series(name, course, f"c{number % 6 + 1}"))
    return line_chart([float(step) for step in xs], series, title=title)


def _number(value: float | None) -> str:
    return _ABSENT if value is None or not math.isfinite(value) else f"{value:.3f}"


def _busy_share(run: Run) -> str:
    accounts = [account for record in run.records for account in record.ledger.values()]
    whole = sum(account.seconds for account in accounts)
    return format_percent(sum(account.busy for account in accounts) / whole) if whole else _ABSENT
