"""The Gantt chart: the states of each instance over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlhfless_functions.api import STAGES
from rlhfless_operator.records.record import SpanRecord
from rlhfless_operator.report.charts import ticks

MOST_SPANS = 800
"""Most rectangles of one lane. A lane with more spans is divided into that many slices."""


@dataclass(frozen=True)
class Lane:
    """A row of the chart, with instances of one stage one after the other."""

    stage: str
    number: int
    """Number of the row within its stage, from 1."""
    spans: tuple[SpanRecord, ...]
    """Spans in ascending order, without overlaps."""


def lanes(spans: Sequence[SpanRecord]) -> list[Lane]:
    """Put instances into rows. Each stage has as many rows as it had instances at once.

    An instance stays in its row for its whole life; a row is free again when its instance is gone.
    """
    by_instance: dict[tuple[str, str], list[SpanRecord]] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        by_instance.setdefault((span.stage, span.instance), []).append(span)
    rows: dict[str, list[list[SpanRecord]]] = {}
    for (stage, _), life in sorted(by_instance.items(), key=lambda item: item[1][0].start):
        free = next((row for row in rows.setdefault(stage, []) if row[-1].end <= life[0].start + 1e-6), None)
        if free is None:
            rows[stage].append(list(life))
        else:
            free.extend(life)
    known = [stage for stage in STAGES if stage in rows]
    stages = known + sorted(set(rows) - set(known))
    return [Lane(stage, number, tuple(row)) for stage in stages for number, row in enumerate(rows[stage], start=1)]


def window(all_lanes: Sequence[Lane], start: float, end: float) -> list[Lane]:
    """Return the same rows, cut to the time from `start` to `end`."""
    return [Lane(lane.stage, lane.number, tuple(_clipped(lane.spans, start, end))) for lane in all_lanes]


def gantt(all_lanes: Sequence[Lane], start: float, end: float) -> str:
    """Draw the chart from `start` to `end`, in seconds since the run began.

    Returns:
        One row for each lane, and a time axis; a sentence if there are no lanes.
    """
    if not all_lanes or end <= start:
        return '<p class="none">No instances were recorded.</p>'
    counts: dict[str, int] = {}
    for lane in all_lanes:
        counts[lane.stage] = max(counts.get(lane.stage, 0), lane.number)
    rows = ""
    for lane in all_lanes:
        label = f"{lane.stage} {lane.number}" if counts[lane.stage] > 1 else lane.stage
        marks = "".join(_span(span, start, end) for span in _thinned(lane.spans, start, end))
        rows += (
            f'<div class="name">{escape(label)}</div><svg class="lane" viewBox="0 0 10000 10"'
            f' preserveAspectRatio="none" role="img" aria-label="{escape(label)}">{marks}</svg>'
        )
    shown = [tick for tick in ticks(start, end, 6) if start <= tick <= end]
    axis = "".join(f'<span style="left:{100 * (tick - start) / (end - start):.2f}%">{tick:g}</span>' for tick in shown)
    axis = f'<div></div><div class="x">{axis}</div><div></div><div class="xname">seconds</div>'
    return f'<div class="gantt">{rows}{axis}</div>'


def _span(span: SpanRecord, start: float, end: float) -> str:
    left = 10_000 * (span.start - start) / (end - start)
    width = 10_000 * (span.end - span.start) / (end - start)
    title = escape(f"{span.instance}\n{span.state} {span.start:.2f}–{span.end:.2f} s ({span.end - span.start:.2f} s)")
    return (
        f'<rect class="fill {span.state}" x="{left:.1f}" y="0" width="{width:.1f}" height="10">'
        f"<title>{title}</title></rect>"
    )


def _clipped(spans: Sequence[SpanRecord], start: float, end: float) -> list[SpanRecord]:
    return [
        span.model_copy(update={"start": max(span.start, start), "end": min(span.end, end)})
        for span in spans
        if span.end > start and span.start < end
    ]


def _thinned(spans: Sequence[SpanRecord], start: float, end: float) -> Sequence[SpanRecord]:
    """Return the spans. If there are too many to tell apart, return slices, each with the state that fills most of
    it."""
    if len(spans) <= MOST_SPANS:
        return spans
    width = (end - start) / MOST_SPANS
    slices: list[dict[tuple[str, str], float]] = [{} for _ in range(MOST_SPANS)]
    for span in spans:
        for number in range(
            int((span.start - start) / width), min(MOST_SPANS - 1, int((span.end - start) / width)) + 1
        ):
            share = min(span.end, start + (number + 1) * width) - max(span.start, start + number * width)
            key = (span.instance, span.state)
            slices[number][key] = slices[number].get(key, 0.0) + share
    merged = []
    for number, shares in enumerate(slices):
        if sum(shares.values()) >= width / 2:
            instance, state = max(shares, key=lambda key: shares[key])
            values = {"instance": instance, "state": state, "start": start + number * width}
            merged.append(spans[0].model_copy(update={**values, "end": start + (number + 1) * width}))
    return merged
