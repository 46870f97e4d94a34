"""Traces: what runs write of their lengths, and how they are read again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rlhfless_functions.api import PrepareRequest
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.data.traces import (
    TraceLengths,
    TraceRows,
    read_trace_rows,
    trace_rows,
    write_trace_rows,
)
from rlhfless_functions.data.turns import TracedResponse
from rlhfless_operator import cli
from rlhfless_operator.simulator.simulate import simulate
from rlhfless_operator.simulator.traces import (
    LengthStatistics,
    RecordedTrace,
    Trace,
    generate,
    read_trace,
    write_trace,
)
from tests.training.whole_jobs import folder_of, run_job


def rows(*responses: tuple[int, int, int, int], step: int | None = None) -> TraceRows:
    """(prompt, epoch, sample, response tokens) each; a prompt's own tokens are ten times its number."""
    prompt, epoch, sample, tokens = (np.array(column, np.int64) for column in zip(*responses, strict=True))
    return TraceRows(prompt, epoch, sample, prompt * 10, tokens, None if step is None else np.full(len(prompt), step))


def test_parts_of_a_folder_and_of_a_run_are_one_trace(tmp_path: Path) -> None:
    first, second = rows((3, 0, 0, 5), (3, 0, 1, 6), step=1), rows((4, 0, 0, 7), step=2)
    write_trace_rows(str(tmp_path / "run" / "traces" / "step-000001" / "a.parquet"), first)
    write_trace_rows(str(tmp_path / "run" / "traces" / "step-000002" / "b.parquet"), second)
    for place in (tmp_path / "run", tmp_path / "run" / "traces"):
        read = read_trace_rows(str(place))
        assert read.prompt.tolist() == [3, 3, 4]
        assert read.response_tokens.tolist() == [5, 6, 7]
        assert read.step is not None and read.step.tolist() == [1, 1, 2]


def test_a_response_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    for name in "ab":
        write_trace_rows(str(tmp_path / f"{name}.parquet"), rows((0, 0, 0, 5), (0, 0, 1, 6), step=1))
    assert read_trace_rows(str(tmp_path)).response_tokens.tolist() == [5, 6]


def test_steps_are_told_only_where_every_part_has_them(tmp_path: Path) -> None:
    write_trace_rows(str(tmp_path / "a.parquet"), rows((0, 0, 0, 5), step=1))
    write_trace_rows(str(tmp_path / "b.parquet"), rows((1, 0, 0, 5)))
    assert read_trace_rows(str(tmp_path)).step is None


def test_a_rehearsal_gives_each_prompt_the_lengths_of_its_last_visit_before() -> None:
    early, late = rows((5, 0, 0, 10), (5, 0, 1, 11), (8, 0, 0, 30), step=1), rows((5, 1, 0, 20), (5, 1, 1, 21), step=4)
    both = TraceRows(*(np.concatenate([getattr(early, name), getattr(late, name)]) for name in early.columns))
    lengths = TraceLengths(both, prompts_per_step=2)
    assert lengths.prompt_tokens == [50, 80], "the rehearsal's prompts are the trace's, numbered from 0"
    assert [lengths.response_tokens(step, 0, 1) for step in (1, 3, 4, 9)] == [11, 11, 21, 21]
    assert lengths.response_tokens(2, 1, 3) == 30, "a group with fewer samples repeats them"


def test_how_samples_acted_is_kept_where_every_part_says_so(tmp_path: Path) -> None:
    acted = replace(
        rows((0, 0, 0, 50), (0, 0, 1, 60), step=1),
        turns=np.array([2, 3]),
        given_tokens=np.array([7, 0]),
        away_milliseconds=np.array([1500, 0]),
    )
    write_trace_rows(str(tmp_path / "a.parquet"), acted)
    lengths = TraceLengths(read_trace_rows(str(tmp_path)), prompts_per_step=1)
    assert lengths.acts
    assert lengths.response(1, 0, 0) == TracedResponse(sampled=50, turns=2, given=7, away_seconds=1.5)
    assert lengths.response(1, 0, 1) == TracedResponse(sampled=60, turns=3)
    write_trace_rows(str(tmp_path / "b.parquet"), rows((1, 0, 0, 5), step=1))
    without = TraceLengths(read_trace_rows(str(tmp_path)), prompts_per_step=1)
    assert not without.acts and without.response(1, 0, 0) == TracedResponse(50)


def test_a_run_writes_how_its_samples_acted() -> None:
    outcome = {"turns": 2, "seconds_away": 1.23456}
    sample = GeneratedSample(3, 1, [1] * 4, [5] * 10, [0.0] * 10, "stop", [], given=[(2, 6)], outcome=outcome)
    found = trace_rows([sample], {3: 1}, 7)
    assert {name: column.tolist() for name, column in found.columns.items()} == {
        "prompt": [3],
        "epoch": [1],
        "sample": [1],
        "prompt_tokens": [4],
        "response_tokens": [6],
        "step": [7],
        "turns": [2],
        "given_tokens": [4],
        "away_milliseconds": [1235],
    }


def test_without_steps_epochs_are_spread_over_them() -> None:
    trace = rows(*((prompt, epoch, 0, 100 * epoch + prompt) for epoch in range(2) for prompt in range(5)))
    lengths = TraceLengths(trace, prompts_per_step=2)
    assert [lengths.response_tokens(step, 4, 0) for step in range(1, 7)] == [4, 4, 4, 104, 104, 104]


def test_recorded_steps_are_replayed_as_they_were(tmp_path: Path) -> None:
    file = str(tmp_path / "trace.parquet")
    steps = [rows((0, 0, 0, 5), (0, 0, 1, 6), (1, 0, 0, 7), step=1), rows((2, 0, 0, 9), (0, 1, 1, 8), step=2)]
    write_trace_rows(file, TraceRows(*(np.concatenate([getattr(s, name) for s in steps]) for name in steps[0].columns)))
    trace = read_trace(file)
    assert isinstance(trace, RecordedTrace)
    assert [step.lengths for step in trace.steps(7, np.random.default_rng(0))] == [
        {0: [5, 6], 1: [7]},
        {0: [8], 2: [9]},
    ]
    assert [step.epoch for step in trace.recorded] == [0, 0]
    assert (trace.prompts, trace.samples, trace.longest, trace.prompts_per_step) == (3, 2, 9, 2)
    result = simulate("paper-3b-gsm8k-grpo", [0], trace=trace)
    assert all(row["seconds"] > 0 for row in result["policies"])


def test_a_request_carries_the_visits_of_its_prompts() -> None:
    fields = PrepareRequest.model_fields
    assert fields["visits"].default == {} and fields["trace"].default is None


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_real_run_leaves_a_trace_that_another_policy_can_replay(tiny_job: Callable[..., Path]) -> None:
    file = tiny_job(steps=4)
    run_job(file)
    root = folder_of(file)
    written = read_trace_rows(str(root))
    assert written.step is not None
    # Twelve prompts, four a step: the fourth step is the second epoch's first.
    assert sorted(set(zip(written.step.tolist(), written.epoch.tolist(), strict=True))) == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 1),
    ]
    assert len(written.prompt) == 4 * 4 * 4
    index = json.loads((root / "data" / "training" / "index.json").read_text())
    assert written.prompt_tokens.tolist() == [index["lengths"][prompt] for prompt in written.prompt.tolist()]
    records = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        mine = written.response_tokens[written.step == record["step"]]
        assert record["metrics"]["lengths"] == pytest.approx(mine.mean())
    trace = read_trace(root)
    assert not isinstance(trace, Trace) and len(trace.recorded) == 4
    result = simulate("paper-3b-gsm8k-grpo", [0], policies=["static", "rlhfless"], trace=trace)
    assert [row["policy"] for row in result["policies"]] == ["static", "rlhfless"]


def test_a_trace_is_simulated_on_the_hardware_that_is_asked_for(tmp_path: Path) -> None:
    generated = generate(LengthStatistics(median=40, longest=90), epochs=2, prompts=6, samples=2, seed=5)
    write_trace(tmp_path / "trace.parquet", generated)
    options = ["--trace", str(tmp_path / "trace.parquet"), "--seeds", "1", "--gpus", "4", "--json"]
    results = {}
    for gpu in ("L40S", "H100"):
        page = tmp_path / f"{gpu}.html"
        made = CliRunner().invoke(cli.app, ["simulate", *options, "--gpu", gpu, "--html", str(page)])
        assert made.exit_code == 0, made.output
        results[gpu] = json.loads(made.stdout)
        assert results[gpu]["scenario"] == f"trace.parquet on 4 × {gpu}"
        assert "<svg" in page.read_text()
    assert results["H100"]["policies"][0]["seconds"] < results["L40S"]["policies"][0]["seconds"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "SCENARIO is missing: give --trace, or one of paper-3b-gsm8k-grpo"),
        (["--trace", "nowhere"], "nowhere holds no trace"),
        (["paper-3b-gsm8k-grpo", "--gpu", "B300"], "gpu is 'B300': choose one of L40S"),
        (["paper-3b-gsm8k-grpo", "--gpu", "A100"], "no price of A100 is known here, so give --gpu-hour"),
        (["paper-3b-gsm8k-grpo", "--lambda", "1.5"], "between 0 and 1; the nearest is 1"),
        (["paper-3b-gsm8k-grpo", "--model", "Llama-2-70B"], "does not fit 1 × L40S; use at least 4"),
        (["paper-3b-gsm8k-grpo", "--gpus", "0"], "gpus is 0: one instance needs 1"),
    ],
)
def test_what_cannot_be_simulated_is_named(options: list[str], message: str) -> None:
    made = CliRunner().invoke(cli.app, ["simulate", *options])
    assert isinstance(made.exception, ValueError) and message in str(made.exception)
