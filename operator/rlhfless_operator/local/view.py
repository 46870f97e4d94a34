"""The view of a training job: live in a terminal, plain lines elsewhere.

`render` and `plain_line` are pure. Only `TrainingView` uses the terminal.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlhfless_functions.api import STAGES
from rlhfless_operator.console import PlainConsole
from rlhfless_operator.formatting import format_clock, format_money, format_number, format_percent, sparkline
from rlhfless_operator.job.charged import CHARGED
from rlhfless_operator.records import barren_steps, mismatch
from rlhfless_operator.records.forecast import forecast_cost, recent_steps
from rlhfless_operator.records.record import StepRecord

_STATE_STYLES = {
    "starting": "yellow",
    "busy": "green",
    "idle": "dim",
    "switching": "cyan",
    "draining": "magenta",
    "asleep": "blue",
}


@dataclass(frozen=True)
class ViewState:
    """A moment of a run."""

    job: str
    """Name of the job."""
    steps: int
    """Steps of the whole job."""
    stage: str = ""
    """Current activity: generation, preparation, learning, evaluation, export."""
    under_way: Sequence[tuple[str, int]] = ()
    """Running stages and their steps; an asynchronous job has several at once."""
    done: int = 0
    """Finished samples of the stage."""
    wanted: int = 0
    """Samples of the stage; 0 if it does not count samples."""
    seconds: float = 0.0
    """Seconds of training so far, the current step included."""
    cost: Decimal = Decimal(0)
    """Money so far, the current step included."""
    currency: str = "USD"
    """Currency of the money."""
    budget_used: float | None = None
    """Share of the budget that is spent, the current step included; None without a budget."""
    instances: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Number of instances by (stage, state)."""
    records: Sequence[StepRecord] = ()
    """The finished steps, from step 0 if there was an evaluation before the first."""

    @property
    def finished(self) -> int:
        """Number of the last finished step."""
        return self.records[-1].step if self.records else 0


@dataclass(frozen=True)
class Forecast:
    """Forecast for the rest of a run, if its steps continue like the last ones."""

    seconds: float
    """Seconds until the last step is finished."""
    cost: Decimal
    """Money for the whole run."""


def forecast(state: ViewState) -> Forecast | None:
    """Return the forecast from the means of recent steps; None before the second step is finished."""
    recent = recent_steps(state.records)
    cost = forecast_cost(state.cost, state.records, state.steps)
    if cost is None:
        return None
    step_seconds = sum(record.seconds for record in recent) / max(1, len(recent))
    return Forecast(seconds=step_seconds * max(0, state.steps - state.finished), cost=cost)


def render(state: ViewState, width: int) -> RenderableType:
    """Return the view of one moment, at most `width` columns wide.

    Args:
        state: what to show.
        width: columns of the terminal.
    """
    rows = Table.grid(padding=(0, 2), expand=False)
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for label, text in _rows(state, width):
        rows.add_row(label, text)
    bar = ProgressBar(total=max(1, state.steps), completed=state.finished, width=width)
    # A bar alone does not end its line.
    return Group(_heading(state), Padding(bar, 0), rows)


def plain_line(record: StepRecord, steps: int | None = None) -> str:
    """Return one finished step as one line, for logs and pipes.

    Args:
        record: the step.
        steps: steps of the whole job, if the line should name them.
    """
    parts = [f"step {record.step}" + (f"/{steps}" if steps else "")]
    parts += [f"{label} {text}" for label, text in _figures(record)]
    if record.held_out_reward is not None:
        parts.append(f"held-out reward {record.held_out_reward:.3f}")
    if record.step > 0:
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in record.stages.items())
        parts.append(f"{record.seconds:.1f} s" + (f" ({stages})" if stages else ""))
    if record.cost:
        parts.append(f"cost {format_number(float(record.cost))}")
    return "  ".join(parts)


class TrainingView:
    """Shows a run on a console. It is a context manager, which restores the terminal at the end.

    Args:
        job: name of the job.
        steps: steps of the whole job.
        console: the console; by default standard error, because standard output is for results.
        after: last step that an earlier driver has shown; lines up to it are not repeated.
    """

    def __init__(self, job: str, steps: int, console: Console | None = None, after: int = -1) -> None:
        self._console = console or PlainConsole(stderr=True)
        self._state = ViewState(job=job, steps=steps)
        self._live: Live | None = None
        self._shown = after

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __rich__(self) -> RenderableType:
        return render(self._state, self._console.width)

    def update(self, state: ViewState) -> None:
        """Show another moment. In a terminal the view is redrawn; elsewhere each newly finished step is a line."""
        self._state = state
        shown, self._shown = self._shown, max(self._shown, state.finished)
        for number, record in enumerate(state.records, start=1):
            if record.step <= shown:
                continue
            if not self._console.is_terminal:
                self.say(plain_line(record, state.steps))
            for kind in (barren_steps, mismatch):
                if kind.is_due(so_far := state.records[:number]):
                    self.say(f"warning: {kind.warning_now(so_far)}")

    def say(self, message: str) -> None:
        """Print a permanent line above the live view."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)


def _heading(state: ViewState) -> Text:
    text = Text.assemble((state.job, "bold"), "  ", f"step {min(state.finished + 1, state.steps)}/{state.steps}")
    if len(state.under_way) > 1:
        text.append("  ")
        text.append(" · ".join(f"{stage} {step}" for stage, step in state.under_way), style="bold cyan")
    elif state.stage in STAGES:
        for stage in STAGES:
            text.append("  " if stage == STAGES[0] else " → ", style="dim")
            text.append(stage, style="bold cyan" if stage == state.stage else "dim")
    elif state.stage:
        text.append(f"  {state.stage}", style="bold cyan")
    if state.wanted:
        text.append(f"  {state.done}/{state.wanted} samples")
    return text


def _rows(state: ViewState, width: int) -> Iterator[tuple[str, Text]]:
    trained = [record for record in state.records if record.step > 0]
    if trained:
        last = trained[-1]
        rewards = [record.metric("reward") for record in trained]
        line = Text(f"{_fixed(rewards[-1])}  ", style="bold")
        line.append(sparkline(rewards, max(8, min(48, width - 24))), style="green")
        yield "reward", line
        figures = dict(_figures(last))
        yield "policy", Text("   ".join(f"{name} {figures[name]}" for name in ("kl", "entropy") if name in figures))
        lengths = [f"{name} {figures[name]}" for name in ("length", "truncated") if name in figures]
        yield "tokens", Text("   ".join(lengths))
    evaluations = [(each.step, each.held_out_reward) for each in state.records if each.held_out_reward is not None]
    if evaluations:
        yield "held-out", Text(" → ".join(f"{value:.3f} (step {step})" for step, value in evaluations[-3:]))
    for kind in (barren_steps, mismatch):
        if warning := kind.warning_now(state.records):
            yield "warning", Text(warning, style="yellow")
    yield "instances", _instances(state.instances)
    ahead = forecast(state)
    money, time = format_money(state.cost, state.currency), format_clock(state.seconds)
    money += f"   forecast {format_money(ahead.cost, state.currency)}" if ahead else ""
    yield "money", Text(money + (f"   budget {state.budget_used:.0%} used" if state.budget_used is not None else ""))
    yield "time", Text(time + (f"   left {format_clock(ahead.seconds)}" if ahead else ""))


def _instances(counts: Mapping[tuple[str, str], int]) -> Text:
    text = Text()
    for stage in CHARGED:
        present = [(state, counts.get((stage, state), 0)) for state in _STATE_STYLES]
        present = [(state, count) for state, count in present if count]
        if not present:
            continue
        text.append(("   " if text else "") + stage)
        for state, count in present:
            text.append(f" {count} {state}", style=_STATE_STYLES[state])
    return text or Text("none", style="dim")


def _figures(record: StepRecord) -> Iterator[tuple[str, str]]:
    """Return the step's most important numbers that exist, each with a short name."""
    metrics = record.metrics
    if "reward" in metrics:
        yield "reward", _fixed(metrics["reward"])
    if "kl/reference" in metrics:
        yield "kl", format_number(metrics["kl/reference"])
    if "policy/entropy" in metrics:
        yield "entropy", format_number(metrics["policy/entropy"])
    if "lengths/mean" in metrics:
        longest = f" (max {metrics['lengths/max']:.0f})" if "lengths/max" in metrics else ""
        yield "length", f"{metrics['lengths/mean']:.1f}{longest}"
    if "truncated" in metrics:
        yield "truncated", format_percent(metrics["truncated"])


def _fixed(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"
