"""Simulated responses that act: turns, waits for environments, and instances that are let go meanwhile."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.data.traces import TraceRows, write_trace_rows
from rlhfless_functions.data.turns import TracedResponse
from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.simulator.asynchronous.compare import compare
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS
from rlhfless_operator.simulator.episode import Episode
from rlhfless_operator.simulator.instance import Instance, LettingGo, Response
from rlhfless_operator.simulator.policies import find_policy
from rlhfless_operator.simulator.scenarios import SCENARIOS
from rlhfless_operator.simulator.simulate import fitted, simulate
from rlhfless_operator.simulator.steps import run_policy
from rlhfless_operator.simulator.traces import RecordedTrace, read_trace

LATENCY = LinearLatency(step_seconds=1.0, sequence_seconds=0.0, context_seconds=0.0, prefill_token_seconds=0.01)
PROMPT = 100


def acting(prompt: int, traced: TracedResponse) -> Response:
    return Response(prompt, 0, PROMPT, traced.sampled, episode=Episode(traced))


def instance(*responses: Response, letting_go: LettingGo | None = None, latency: LinearLatency = LATENCY) -> Instance:
    made = Instance("actor", latency, 0.0, max_batch=8, kv_tokens=10**6, letting_go=letting_go)
    made.add(list(responses))
    return made


def test_a_response_waits_before_its_first_turn_and_after_each_and_reads_what_it_is_given() -> None:
    alone = instance(acting(0, TracedResponse(sampled=30, turns=3, given=20, away_seconds=40.0)))
    assert alone.next_end() == 10.0, "the environment begins the episode"
    ((end, key),) = alone.advance(1e6)
    assert key == (0, 0)
    assert end == pytest.approx(40.0 + 1.0 + 30.0 + 0.2)
    assert alone.busy == pytest.approx(31.2), "nothing is computed while it waits"
    assert alone.empty


def test_the_others_go_on_meanwhile() -> None:
    both = instance(acting(0, TracedResponse(20, turns=2, away_seconds=30.0)), Response(1, 0, PROMPT, 40))
    ends = {key: end for end, key in both.advance(1e6)}
    assert ends[1, 0] == pytest.approx(1.0 + 40.0 + 1.0), "the second prompt is read beside it"
    assert ends[0, 0] == pytest.approx(30.0 + 20.0 + 1.0)


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 9)), min_size=1, max_size=8),
    st.floats(0, 0.01),
    st.floats(0, 1e-4),
)
def test_turns_that_take_no_time_and_give_nothing_change_nothing(
    responses: list[tuple[int, int]], sequence: float, context: float
) -> None:
    latency = replace(LATENCY, sequence_seconds=sequence, context_seconds=context)
    plain = instance(*(Response(n, 0, PROMPT, length) for n, (length, _) in enumerate(responses)), latency=latency)
    turns = instance(
        *(acting(n, TracedResponse(length, turns=turns)) for n, (length, turns) in enumerate(responses)),
        latency=latency,
    )
    expected = {key: end for end, key in plain.advance(1e6)}
    assert {key: end for end, key in turns.advance(1e6)} == pytest.approx(expected, rel=1e-6)
    assert turns.busy == pytest.approx(plain.busy, rel=1e-6)


def test_an_instance_is_let_go_while_all_wait_for_longer_than_its_patience() -> None:
    traced = TracedResponse(sampled=20, turns=2, given=10, away_seconds=30.0)
    kept, let_go = instance(acting(0, traced)), instance(acting(0, traced), letting_go=LettingGo(4.0, 3.0))
    ((without, _),), ((end, _),) = kept.advance(1e6), let_go.advance(1e6)
    assert let_go.let_go == pytest.approx(3 * (10.0 - 4.0)), "three waits of 10 s"
    # It starts twice, and then reads the prompt and the first turn again. After its end it need not start.
    again = (PROMPT + 10) * LATENCY.prefill_token_seconds
    assert end - without == pytest.approx(2 * 3.0 + again)
    assert kept.let_go == 0.0


def test_one_that_decodes_for_others_is_kept() -> None:
    both = instance(
        *(acting(0, TracedResponse(20, turns=2, away_seconds=30.0)), Response(1, 0, PROMPT, 100)),
        letting_go=LettingGo(4.0, 3.0),
    )
    both.advance(1e6)
    assert both.let_go == 0.0


def test_one_that_is_moved_while_it_is_away_goes_on_elsewhere_when_its_environment_answers() -> None:
    source = instance(acting(0, TracedResponse(20, turns=1, away_seconds=30.0)))
    source.advance(5.0)
    moved = source.remove({(0, 0)})
    assert source.empty and source.next_end() == float("inf")
    target = Instance("other", LATENCY, 5.0, max_batch=8, kv_tokens=10**6)
    target.add(moved)
    ((end, _),) = target.advance(1e6)
    assert end == pytest.approx(15.0 + 1.0 + 20.0 + 15.0)


@pytest.fixture
def trace(tmp_path: Path) -> RecordedTrace:
    """Two steps of 16 prompts whose environments take a minute for an answer."""
    step, prompt, sample = np.indices((3, 16, 8)).reshape(3, -1)
    turns = 2 + (prompt + sample) % 3
    write_trace_rows(
        str(tmp_path / "trace.parquet"),
        TraceRows(
            *(prompt, step, sample, np.full_like(prompt, 200), 100 * turns, step + 1),
            turns=turns,
            given_tokens=50 * turns,
            away_milliseconds=60_000 * (turns + 1),
        ),
    )
    read = read_trace(tmp_path / "trace.parquet")
    assert isinstance(read, RecordedTrace) and read.acts
    return read


SCENARIO = replace(SCENARIOS["paper-3b-gsm8k-grpo"], gpus=8)


def test_a_step_lasts_as_long_as_its_slowest_episode_and_ours_holds_no_gpu_meanwhile(trace: RecordedTrace) -> None:
    result = simulate(SCENARIO, range(1), policies=["static", "rlhfless"], trace=trace)
    static, ours = ({row["policy"]: row for row in result["policies"]}[name] for name in ("static", "rlhfless"))
    assert 300 < static["seconds"] < ours["seconds"] < 1.2 * static["seconds"]
    assert ours["gpu_seconds"] < 0.3 * static["gpu_seconds"]


def test_what_letting_go_saves_is_seen(trace: RecordedTrace) -> None:
    policy, scenario = find_policy("rlhfless"), fitted(SCENARIO, trace)
    lets_go, keeps = (
        sum(step.generation_gpu_seconds for step in run_policy(scenario, settings, trace, 0))
        for settings in (policy, replace(policy, lets_go=False))
    )
    assert lets_go < 0.4 * keeps


@pytest.mark.parametrize(
    "name", ["one-step-off", "areal-1", "laminar", "rlhfless-async-1", "rlhfless-async-2-switch-keep-downweight"]
)
def test_asynchronous_systems_wait_for_environments_too(trace: RecordedTrace, name: str) -> None:
    quick = RecordedTrace(trace.prompt_tokens, [replace(step, acted={}) for step in trace.recorded])
    slow, fast = (
        compare(SCENARIO, range(1), trace=each, systems={name: SYSTEMS[name]}, synchronous=["static"])["policies"][-1]
        for each in (trace, quick)
    )
    assert slow["policy"] == fast["policy"] == name
    assert slow["seconds"] > 3 * fast["seconds"]


def test_turns_without_steps_are_refused(tmp_path: Path) -> None:
    column = np.zeros(1, np.int64)
    acted = dict.fromkeys(("turns", "given_tokens", "away_milliseconds"), column + 1)
    write_trace_rows(str(tmp_path / "t.parquet"), TraceRows(column, column, column, column + 5, column + 9, **acted))
    with pytest.raises(ValueError, match="has turns and no column step: add step, or remove turns"):
        read_trace(tmp_path / "t.parquet")
