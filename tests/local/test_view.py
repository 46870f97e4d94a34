"""What a person sees while a job trains."""

import io
import math
import os
import pty
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlhfless_operator.formatting import averaged, format_clock, format_money, format_number, sparkline
from rlhfless_operator.local.view import TrainingView, ViewState, forecast, plain_line, render
from rlhfless_operator.records.record import StepRecord


def step(number: int, reward: float = 0.5, seconds: float = 2.0, cost: str = "0.001") -> StepRecord:
    return StepRecord.model_validate(
        {
            "step": number,
            "seconds": seconds,
            "stages": {"generation": 0.4, "preparation": 0.5, "learning": 1.0, "overhead": 0.1},
            "metrics": {
                "reward": reward,
                "kl/reference": 0.0032,
                "policy/entropy": 0.41,
                "lengths/mean": 61.5,
                "lengths/max": 201.0,
                "truncated": 0.0125,
            },
            "ledger": {"generation": {"busy": 0.4, "idle": 0.1, "cost": cost}},
        }
    )


EVALUATION = StepRecord.model_validate({"step": 0, "evaluation": {"reward": 0.415}})

MIDDLE = ViewState(
    job="quickstart-grpo",
    steps=48,
    stage="generation",
    done=183,
    wanted=256,
    seconds=67.0,
    cost=Decimal("0.0064"),
    currency="EUR",
    instances={("generation", "busy"): 2, ("preparation", "idle"): 1},
    records=[EVALUATION, *(step(number, reward=number / 48) for number in range(1, 13))],
)


def barren(*steps: int) -> list[StepRecord]:
    """Records of steps, with nothing to learn from."""
    made = [step(number) for number in steps]
    return [each.model_copy(update={"metrics": {**each.metrics, "batch/teaching_groups": 0.0}}) for each in made]


@pytest.mark.parametrize(("after", "told"), [(-1, [3, 6]), (4, [6])])
def test_steps_that_teach_nothing_are_told_when_they_count_and_when_they_have_doubled(
    after: int, told: list[int]
) -> None:
    stream = io.StringIO()
    view = TrainingView("job", 8, Console(file=stream, width=100), after=after)
    for number in range(1, 9):
        view.update(ViewState(job="job", steps=8, records=barren(*range(1, number + 1))))
    warnings = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert [
        f"steps 1 to {number} had nothing to learn from" in line for number, line in zip(told, warnings, strict=True)
    ] == [True for _ in told]
    assert "steps 1 to 3 had nothing to learn from" in shown(ViewState(job="job", steps=8, records=barren(1, 2, 3)))


def test_a_disagreement_of_engine_and_learner_is_told_and_stays_in_view() -> None:
    unlike = {"mismatch/mean_exp_abs": 6.0, "mismatch/explained": 1.05}
    records = [step(1), step(2).model_copy(update={"metrics": unlike})]
    stream = io.StringIO()
    TrainingView("job", 8, Console(file=stream, width=100)).update(ViewState(job="job", steps=8, records=records))
    assert "warning: step 2: engine and learner give the sampled tokens other log-probabilities" in stream.getvalue()
    assert "step 2: engine and learner" in shown(ViewState(job="job", steps=8, records=records))


def shown(state: ViewState, width: int = 100) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(render(state, width))
    return stream.getvalue()


def test_the_view_says_where_the_run_is_and_what_it_costs() -> None:
    text = shown(MIDDLE)
    for part in (
        "quickstart-grpo",
        "step 13/48",
        "generation → preparation → learning",
        "183/256 samples",
        "0.250",
        "▁",
        "█",
        "kl 0.0032",
        "entropy 0.41",
        "length 61.5 (max 201)",
        "truncated 1.2 %",
        "0.415 (step 0)",
        "generation 2 busy",
        "preparation 1 idle",
        "0.0064 EUR",
        "1:07",
    ):
        assert part in text


def test_the_forecast_assumes_that_the_rest_goes_like_the_recent_steps() -> None:
    ahead = forecast(MIDDLE)
    assert ahead is not None
    assert ahead.seconds == pytest.approx(36 * 2.0)
    assert ahead.cost == Decimal("0.0064") + 36 * Decimal("0.001")


def test_a_slow_first_step_is_forgotten_by_the_forecast() -> None:
    records = [step(1, seconds=100.0), *(step(number, seconds=2.0) for number in range(2, 20))]
    ahead = forecast(ViewState(job="j", steps=20, records=records))
    assert ahead is not None
    assert ahead.seconds == pytest.approx(2.0)


def test_before_the_first_step_there_is_no_forecast() -> None:
    state = ViewState(job="j", steps=48, stage="evaluation", records=[EVALUATION])
    assert forecast(state) is None
    assert "forecast" not in shown(state)
    assert "evaluation" in shown(state)


def test_an_asynchronous_job_shows_all_stages_that_are_under_way() -> None:
    state = replace(MIDDLE, under_way=[("generation", 14), ("learning", 13)])
    assert "generation 14 · learning 13  10/32 samples" in shown(state).replace(f"{state.done}/{state.wanted}", "10/32")
    assert "generation → preparation → learning" in shown(replace(MIDDLE, under_way=[("generation", 13)]))


def test_the_used_share_of_the_budget_stands_beside_the_money() -> None:
    assert "budget" not in shown(MIDDLE)
    text = shown(replace(MIDDLE, budget_used=0.416))
    assert "forecast 0.042 EUR   budget 42% used" in text


def test_an_instance_that_sleeps_or_wakes_is_shown() -> None:
    text = shown(replace(MIDDLE, instances={("generation", "switching"): 1, ("learning", "asleep"): 1}))
    assert "generation 1 switching   learning 1 asleep" in text


def test_a_finished_run_has_nothing_left() -> None:
    ahead = forecast(ViewState(job="j", steps=2, cost=Decimal("0.5"), records=[step(1), step(2)]))
    assert ahead is not None
    assert (ahead.seconds, ahead.cost) == (0.0, Decimal("0.5"))
    assert "step 2/2" in shown(ViewState(job="j", steps=2, records=[step(1), step(2)]))


@given(width=st.integers(30, 200), finished=st.integers(0, 12))
def test_no_line_is_wider_than_the_terminal(width: int, finished: int) -> None:
    state = ViewState(**{**MIDDLE.__dict__, "records": MIDDLE.records[: finished + 1]})
    assert max(len(line) for line in shown(state, width).splitlines()) <= width


def test_a_plain_line_tells_a_step_in_one_line() -> None:
    line = plain_line(step(12, reward=0.6119), steps=48)
    assert line == (
        "step 12/48  reward 0.612  kl 0.0032  entropy 0.41  length 61.5 (max 201)  truncated 1.2 %"
        "  2.0 s (generation 0.4, preparation 0.5, learning 1.0, overhead 0.1)  cost 0.001"
    )


def test_the_plain_line_of_an_evaluation_names_the_held_out_reward_alone() -> None:
    assert plain_line(EVALUATION) == "step 0  held-out reward 0.415"


def test_metrics_that_are_missing_or_not_finite_are_no_error() -> None:
    bare = StepRecord.model_validate({"step": 1, "seconds": 1.0, "metrics": {"reward": None, "truncated": math.nan}})
    assert plain_line(bare) == "step 1  truncated –  1.0 s"
    assert "step 2/3" in shown(ViewState(job="j", steps=3, records=[bare]))


def test_outside_a_terminal_every_finished_step_is_printed_once() -> None:
    stream = io.StringIO()
    with TrainingView("j", 48, Console(file=stream, width=40)) as view:
        view.update(ViewState(job="j", steps=48, records=[EVALUATION]))
        view.update(ViewState(job="j", steps=48, records=[EVALUATION], stage="generation"))
        view.update(ViewState(job="j", steps=48, records=[EVALUATION, step(1), step(2)]))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["0/48", "1/48", "2/48"]


def test_a_job_that_goes_on_does_not_repeat_earlier_steps() -> None:
    stream = io.StringIO()
    with TrainingView("j", 48, Console(file=stream), after=1) as view:
        view.update(ViewState(job="j", steps=48, records=[EVALUATION, step(1)]))
        view.update(ViewState(job="j", steps=48, records=[EVALUATION, step(1), step(2)]))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["2/48"]


def test_in_a_terminal_the_view_is_live_and_gives_the_cursor_back_after_an_error() -> None:
    program = (
        "from rlhfless_operator.local.view import TrainingView, ViewState\n"
        "with TrainingView('live-job', 3) as view:\n"
        "    view.update(ViewState(job='live-job', steps=3, stage='learning'))\n"
        "    raise SystemExit(7)\n"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as an input/output error.
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    assert process.wait() == 7
    text = output.decode()
    assert "live-job" in text
    assert text.rindex("\x1b[?25h") > text.index("\x1b[?25l")


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300), st.integers(1, 60))
def test_a_sparkline_is_never_longer_than_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0], 8) == "▅▅"
    assert sparkline([0.0, math.nan, 1.0], 8) == "▁ █"


def test_a_sparkline_spans_more_than_a_float_can_hold() -> None:
    assert sparkline([1.7e308, -1e292], 8) == "█▁"
    assert sparkline([-1.7e308, 0.0, 1.7e308], 8) == "▁▅█"
    assert sparkline([1.7e308, 1.7e308, -1.7e308, -1.7e308], 2) == "█▁", "nor do means overflow"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 50))
def test_averaging_keeps_the_mean_of_equal_stretches_and_the_range(values: list[float], count: int) -> None:
    shorter = averaged(values, count)
    assert len(shorter) == min(count, len(values))
    assert min(values) - 1e-6 <= min(shorter) and max(shorter) <= max(values) + 1e-6


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        ("0", "0.00 X"),
        ("0.004213", "0.0042 X"),
        ("0.0000004", "0.000000 X"),
        ("12.5", "12.50 X"),
        ("4321", "4,321.00 X"),
    ],
)
def test_money_shows_two_significant_digits(amount: str, text: str) -> None:
    assert format_money(Decimal(amount), "X") == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (67.4, "1:07"), (3600, "1:00:00"), (-3, "0:00")])
def test_a_clock_reads_like_a_clock(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.03151, "0.0315"), (24000.0, "24,000"), (3.1e-6, "3.1e-06"), (1e16, "1e+16"), (math.inf, "–")],
)
def test_a_number_is_short_and_readable(value: float, text: str) -> None:
    assert format_number(value) == text
