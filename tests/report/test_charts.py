"""Charts of the report and the Gantt chart of instances: what is drawn, and what is said where nothing can be."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlhfless_operator.records.record import SpanRecord
from rlhfless_operator.report.charts import POINTS, Mark, Series, line_chart, share_bar, spark, stacked_bars, ticks
from rlhfless_operator.report.gantt import MOST_SPANS, gantt, lanes, window


def test_a_long_run_has_no_huge_report() -> None:
    xs = [float(step) for step in range(1, 20_001)]
    chart = line_chart(xs, [Series("reward", [math.sin(x) for x in xs], "c1")], title="Reward")
    assert chart.count("<rect") == POINTS
    spans = [span("a", number, number + 0.5, state="busy") for number in range(20_000)]
    assert gantt(lanes(spans), 0.0, 20_000.0).count("<rect") <= MOST_SPANS


# --- charts ------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
@example(5e-324, 0.0)
@example(-1e-05, 20021.0)
def test_ticks_are_evenly_spaced_and_cover_the_values(low: float, width: float) -> None:
    marks = ticks(low, low + width)
    assert 2 <= len(marks) <= 13
    # A value that passes a tick by less than could be seen needs no further tick.
    unseen = 1e-8 * (marks[1] - marks[0])
    assert marks[0] <= low + unseen + 1e-6 * max(1, abs(low))
    assert low + width <= marks[-1] + unseen + 1e-6 * max(1, abs(low + width))
    gaps = [after - before for before, after in pairwise(marks)]
    assert max(gaps) - min(gaps) < 1e-6 * max(gaps) + 1e-9


def test_a_gap_breaks_the_line_and_a_lone_value_is_still_drawn() -> None:
    chart = line_chart([1, 2, 3, 4], [Series("a", [1.0, math.nan, 2.0, 3.0], "c1")], title="A")
    path = re.search(r'class="line c1" d="([^"]*)"', chart)
    assert path is not None
    assert path[1].count("M") == 2
    assert "nan" not in chart


def test_values_without_any_number_are_a_sentence() -> None:
    assert "No values." in line_chart([1.0], [Series("a", [math.nan], "c1")], title="A")
    assert "No values." in stacked_bars([1.0], [Series("a", [0.0], "c1")], title="A")
    assert spark([math.nan]) == ""


def test_every_drawn_point_lies_in_the_box() -> None:
    values = [5.0, -3.0, 12.0, 0.0]
    chart = line_chart([0, 1, 2, 3], [Series("a", values, "c1")], title="A", marks=[Mark(-1.0, 20.0, "m")])
    points = [tuple(map(float, pair)) for pair in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", chart)]
    assert all(-0.1 <= x <= 1000.1 and -0.1 <= y <= 400.1 for x, y in points)


def test_tooltips_carry_exact_values_and_escape_names() -> None:
    chart = line_chart([7.0, 8.0], [Series("a<b", [0.5, 0.25], "c1")], title="T")
    assert "<title>step 7\na&lt;b: 0.5</title>" in chart


def test_the_parts_of_a_share_bar_fill_it() -> None:
    bar = share_bar([("x", 1.0, "c1"), ("y", 3.0, "c2")])
    assert [float(width) for width in re.findall(r'width="([\d.]+)"', bar)] == [250.0, 750.0]
    assert "y: 75.0 %" in bar


# --- the Gantt chart ---------------------------------------------------------------------------------------------


def span(instance: str, start: float, end: float, state: Any = "busy", stage: str = "generation") -> SpanRecord:
    return SpanRecord(instance=instance, stage=stage, state=state, start=start, end=end)


def test_instances_that_follow_each_other_share_a_row() -> None:
    rows = lanes([span("a", 0, 1), span("b", 0.5, 2), span("c", 1, 3), span("l", 0, 9, stage="learning")])
    assert [(row.stage, row.number, [one.instance for one in row.spans]) for row in rows] == [
        ("generation", 1, ["a", "c"]),
        ("generation", 2, ["b"]),
        ("learning", 1, ["l"]),
    ]


LIVES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 10)), max_size=20)


@given(LIVES)
def test_rows_never_overlap_and_are_as_few_as_instances_at_a_time(lives: list[tuple[int, int]]) -> None:
    spans = [span(str(number), start, start + length) for number, (start, length) in enumerate(lives)]
    rows = lanes(spans)
    for row in rows:
        assert all(before.end <= after.start + 1e-6 for before, after in pairwise(row.spans))
    most = max((sum(one.start <= time < one.end for one in spans) for time in range(61)), default=0)
    assert len(rows) == most
    assert sum(len(row.spans) for row in rows) == len(spans)


def test_a_window_cuts_spans_at_its_edges() -> None:
    (row,) = window(lanes([span("a", 0, 4), span("a", 4, 5, "idle"), span("a", 8, 9)]), 3, 4.5)
    assert [(one.start, one.end, one.state) for one in row.spans] == [(3, 4, "busy"), (4, 4.5, "idle")]


def test_without_instances_the_chart_is_a_sentence() -> None:
    assert "No instances" in gantt([], 0.0, 1.0)


@pytest.mark.parametrize("constant", [0.0, 1e-300, 1e15, 1e16, 1e20, -1e20, 1e300])
def test_a_constant_of_any_size_is_drawn(constant: float) -> None:
    assert "<path" in spark([constant] * 3)
    assert "<path" in line_chart([1.0, 2.0, 3.0], [Series("a", [constant] * 3, "c1")], title="Constant")


@example([-1.7e308, 1.7e308])
@example([1.3e308] * 3)
@given(st.lists(st.floats(), min_size=1))
def test_values_of_any_size_make_charts_of_finite_numbers(values: list[float]) -> None:
    xs, series = [float(x) for x in range(len(values))], [Series("a", values, "c1"), Series("b", values, "c2")]
    marks = [Mark(xs[0], values[0], "m")]
    drawn = line_chart(xs, series, title="A", marks=marks) + spark(values) + stacked_bars(xs, series, title="A")
    assert not re.search(r"\b(nan|inf)\b", drawn)
    assert "No values." not in drawn or not any(1e-300 < value <= 1e300 for value in values)
