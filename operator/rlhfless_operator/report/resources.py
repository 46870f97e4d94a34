"""The report's charts of time, instances and money."""

from collections.abc import Iterable, Sequence
from decimal import Decimal
from html import escape
from statistics import median

from rlhfless_functions.api import STAGES
from rlhfless_operator.formatting import format_money, format_percent
from rlhfless_operator.records.record import CHARGED_STATES, KEPT_STATES, KeptState, StageAccount
from rlhfless_operator.report.charts import Series, legend, share_bar, stacked_bars
from rlhfless_operator.report.gantt import gantt, lanes, window
from rlhfless_operator.report.hindsight import Hindsight, hindsight, total
from rlhfless_operator.report.run import Run

CLOSE_UP_STEPS = 3

_STAGE_STYLES = {"generation": "c1", "preparation": "c2", "learning": "c3", "overhead": "c5"}


def time(run: Run) -> str:
    """Return the seconds of each step by stage."""
    present = [name for name in _STAGE_STYLES if any(name in record.stages for record in run.trained)]
    if not present:
        return ""
    xs = [float(record.step) for record in run.trained]
    series = [
        Series(name, [record.stages.get(name, 0.0) for record in run.trained], _STAGE_STYLES[name]) for name in present
    ]
    chart = stacked_bars(xs, series, title="Seconds of each step", unit=" s")
    totals = [(name, sum(line.values)) for name, line in zip(present, series, strict=True)]
    whole = sum(seconds for _, seconds in totals) or 1.0
    rows = "".join(
        f'<tr><td><i class="key {_STAGE_STYLES[name]}"></i>{name}</td><td class="n">{seconds / len(xs):.2f} s</td>'
        f'<td class="n">{seconds:.1f} s</td><td class="n">{format_percent(seconds / whole)}</td></tr>'
        for name, seconds in totals
    )
    head = (
        '<tr><th>stage</th><th class="n">mean of a step</th><th class="n">whole run</th><th class="n">share</th></tr>'
    )
    bar = share_bar([(name, seconds, _STAGE_STYLES[name]) for name, seconds in totals])
    return f'<div class="charts">{chart}{_table_card(bar, head + rows)}</div>'


def instances(run: Run) -> str:
    """Return the Gantt charts, of the whole run and of a few steps, and the instance-seconds by state."""
    accounts = stage_accounts(run)
    if not run.spans and not accounts:
        return ""
    content = ""
    states = [state for state in KEPT_STATES if any(span.state == state for span in run.spans)]
    if run.spans:
        rows = lanes(run.spans)
        start, end = min(0.0, *(span.start for span in run.spans)), max(span.end for span in run.spans)
        content += _gantt_figure("The whole run", gantt(rows, start, end), states)
        close_up = _close_up(run, start, end)
        if close_up is not None:
            visible = [lane for lane in window(rows, *close_up) if lane.spans]
            title = f"{CLOSE_UP_STEPS} steps from the middle"
            content += _gantt_figure(title, gantt(visible, *close_up), states)
    return f'<div class="stack">{content}{_state_table(accounts)}{_hindsight_table(hindsight(run.spans))}</div>'


def cost(run: Run) -> str:
    """Cost by stage and by step."""
    accounts = stage_accounts(run)
    total = sum((account.cost for account in accounts.values()), Decimal(0))
    if not total:
        return ""
    rows = "".join(
        f'<tr><td><i class="key {_style(stage)}"></i>{escape(stage)}</td>'
        f'<td class="n">{format_money(account.cost, run.currency)}</td>'
        f'<td class="n">{format_percent(float(account.cost / total))}</td></tr>'
        for stage, account in accounts.items()
    )
    rows += f'<tr class="sum"><td>all stages</td><td class="n">{format_money(total, run.currency)}</td><td></td></tr>'
    bar = share_bar([(stage, float(account.cost), _style(stage)) for stage, account in accounts.items()])
    costs = {
        stage: [float(record.ledger[stage].cost) if stage in record.ledger else 0.0 for record in run.trained]
        for stage in accounts
    }
    chart = ""
    if run.trained:
        # A step of a small job costs so little that only millionths of a currency are readable.
        small = max(max(values) for values in costs.values()) < 1e-3
        factor = 1e6 if small else 1.0
        series = [Series(stage, [factor * value for value in values], _style(stage)) for stage, values in costs.items()]
        note = f"Millionths of a {run.currency}." if small else f"In {run.currency}."
        xs = [float(record.step) for record in run.trained]
        chart = stacked_bars(xs, series, title="Cost of each step", note=note)
    head = '<tr><th>stage</th><th class="n">cost</th><th class="n">share</th></tr>'
    return f'<div class="charts">{chart}{_table_card(bar, head + rows)}</div>'


def _states(accounts: Iterable[StageAccount]) -> list[KeptState]:
    """Return the states in which any instance was."""
    every = list(accounts)
    return [state for state in KEPT_STATES if any(getattr(account, state) for account in every)]


def stage_accounts(run: Run) -> dict[str, StageAccount]:
    """Return the whole run's account of each stage, in the order of a step."""
    names = {stage for record in run.records for stage in record.ledger}
    ordered = [stage for stage in STAGES if stage in names] + sorted(names.difference(STAGES))
    return {
        stage: _sum([record.ledger[stage] for record in run.records if stage in record.ledger]) for stage in ordered
    }


def _sum(accounts: Sequence[StageAccount]) -> StageAccount:
    return StageAccount(
        **{state: sum(getattr(account, state) for account in accounts) for state in KEPT_STATES},
        cost=sum((account.cost for account in accounts), Decimal(0)),
    )


def _table_card(bar: str, rows: str) -> str:
    return f'<div class="card">{bar}<div class="scroll"><table>{rows}</table></div></div>'


def _style(stage: str) -> str:
    return _STAGE_STYLES.get(stage, "c4")


def _close_up(run: Run, start: float, end: float) -> tuple[float, float] | None:
    """Return a period of a few steps in the middle of the run; None if that is most of the run."""
    if len(run.trained) <= 3 * CLOSE_UP_STEPS:
        return None
    length = CLOSE_UP_STEPS * median(record.seconds for record in run.trained)
    middle = (start + end) / 2
    return (middle - length / 2, middle + length / 2) if 0 < length < (end - start) / 2 else None


def _gantt_figure(title: str, chart: str, states: Sequence[KeptState]) -> str:
    keys = legend([(state, state) for state in states])
    return f"<figure><figcaption>{escape(title)}</figcaption>{keys}{chart}</figure>"


def _state_table(accounts: dict[str, StageAccount]) -> str:
    if not accounts:
        return ""
    states = _states(accounts.values())
    rows = ""
    for stage, account in [*accounts.items(), ("all stages", _sum(list(accounts.values())))]:
        seconds = [(state, float(getattr(account, state))) for state in states]
        cells = "".join(f'<td class="n">{value:.1f}</td>' for _, value in seconds)
        share = account.busy / account.seconds if account.seconds else 0.0
        bar = share_bar([(state, value, state) for state, value in seconds if state in CHARGED_STATES])
        rows += (
            f"<tr{_row_style(stage)}><td>{escape(stage)}</td>{cells}<td class='n'>{account.seconds:.1f}</td>"
            f'<td class="n">{format_percent(share)}</td><td>{bar}</td></tr>'
        )
    titles = "".join(f'<th class="n">{title}</th>' for title in (*states, "charged", "busy share"))
    return (
        '<div class="card"><figcaption>Instance-seconds by state</figcaption><div class="scroll">'
        f"<table><tr><th>stage</th>{titles}<th></th></tr>{rows}</table></div></div>"
    )


def _hindsight_table(stages: dict[str, Hindsight]) -> str:
    if not stages:
        return ""
    rows = "".join(
        f'<tr{_row_style(stage)}><td>{escape(stage)}</td><td class="n">{each.paid:.1f}</td>'
        f'<td class="n">{each.least:.1f}</td><td class="n">{each.ratio:.2f}</td></tr>'
        for stage, each in {**stages, "all stages": total(stages)}.items()
    )
    head = '<tr><th>stage</th><th class="n">paid</th><th class="n">least in hindsight</th><th class="n">ratio</th></tr>'
    note = "Lowest possible cost of keeping and releasing instances, with the starts and drains of this run."
    return (
        f'<div class="card"><figcaption>Instance-seconds paid, and the least in hindsight</figcaption><p>{note}</p>'
        f'<div class="scroll"><table>{head}{rows}</table></div></div>'
    )


def _row_style(stage: str) -> str:
    return ' class="sum"' if stage == "all stages" else ""
