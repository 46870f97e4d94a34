"""The emulated GPU: what every engine does with a share, at a latency model's pace, on a clock of the test's own."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.api import EngineRoom, WeightsReference
from rlhfless_functions.data.traces import TraceRows, write_trace_rows
from rlhfless_functions.generation.engines.base import SequenceResult, SequenceTask
from rlhfless_functions.generation.engines.emulated import EOS, EmulatedEngine
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.runtime.task import TaskError
from tests.generation.engines.emulated_runs import (
    EPOCHS,
    MODEL,
    PROMPTS,
    SAMPLES,
    SAMPLING,
    Clock,
    continued,
    emulation,
    engine_of,
    finish,
    share,
    wanted,
)

# --- what comes out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 3])
@pytest.mark.parametrize("step", [1, 2, 6])
def test_responses_have_the_lengths_of_the_steps_epoch_with_weights_of_any_version(
    trace: str, step: int, version: int
) -> None:
    engine, _ = engine_of(trace, version)
    results = finish(engine.start([replace(task, step=step) for task in share()], SAMPLING, None))
    for (prompt, index), result in results.items():
        length = wanted(min(step, EPOCHS) - 1, prompt, index)
        assert len(result.response_tokens) == len(result.log_probs) == min(24, length)
        assert result.finish_reason == ("truncated" if length >= 24 else "stop")
        assert EOS not in result.response_tokens[:-1]
        assert (result.response_tokens[-1] == EOS) == (result.finish_reason == "stop")
    assert len(results) == PROMPTS * SAMPLES


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_split_order_and_room_gives_the_same_tokens(trace: str, data: st.DataObject) -> None:
    engine, _ = engine_of(trace)
    whole = finish(engine.start(share(), SAMPLING, None))
    order = data.draw(st.permutations(share()))
    actors = data.draw(st.integers(1, 4))
    budget = data.draw(st.sampled_from([None, 40, 100]))
    parts: dict[tuple[int, int], SequenceResult] = {}
    for actor in range(actors):
        parts |= finish(engine.start(order[actor::actors], SAMPLING, budget))
    assert parts == whole


def test_after_a_sleep_weights_and_prompts_take_their_time_again(trace: str) -> None:
    engine, clock = engine_of(trace, weight_load_seconds=3.0, prefill_token_seconds=1.0)
    weights = WeightsReference(version=0, uri="w")
    begun = clock.now
    first = finish(engine.start(share(), SAMPLING, None))
    taken = clock.now - begun
    engine.sleep()
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(share(), SAMPLING, None)
    begun = clock.now
    engine.load(MODEL, weights)
    assert clock.now - begun == pytest.approx(3.0)
    begun = clock.now
    assert finish(engine.start(share(), SAMPLING, None)) == first
    assert clock.now - begun == pytest.approx(taken), "no prompt is in the cache"


def test_cut_after_every_token_and_continued_elsewhere_gives_the_same_tokens(trace: str) -> None:
    engine, _ = engine_of(trace)
    tasks = share()
    whole = finish(engine.start(tasks, SAMPLING, None))
    elsewhere, _ = engine_of(trace)
    for cut in range(1, 24):
        run = engine.start(tasks, SAMPLING, None)
        done = {(result.prompt, result.index): result for _ in range(cut) for result in run.step()}
        partials = run.unfinished()
        for partial in partials:
            assert partial.finish_reason == "cut"
            assert partial.response_tokens == whole[partial.prompt, partial.index].response_tokens[:cut]
        rest = [task for task in tasks if (task.prompt, task.index) not in done]
        assert len(partials) == len(rest)
        done |= finish(elsewhere.start(continued(rest, partials)[::-1], SAMPLING, None)) if rest else {}
        assert done == whole


def test_what_is_going_on_is_told(trace: str) -> None:
    engine, _ = engine_of(trace, max_batch=2)
    run = engine.start(share(prompts=1), SAMPLING, None)
    assert (run.running, run.waiting) == (0, 3)
    run.step()
    assert (run.running, run.waiting, run.computed.response, run.computed.prompt) == (2, 1, 2, 1)
    assert run.lengths() == [(0, 0, 1), (0, 1, 1)]


# --- how long it takes -------------------------------------------------------------------------------------------


def test_a_batch_takes_what_the_latency_model_says(trace: str) -> None:
    engine, clock = engine_of(trace, prefill_token_seconds=0.125)
    begun = clock.now
    finish(engine.start(share(prompts=4), SAMPLING, None))
    running = {(prompt, index): min(24, wanted(0, prompt, index)) for prompt in range(4) for index in range(SAMPLES)}
    expected = 0.125 * (1 + 2 + 3 + 4)
    for made in range(24):
        alive = [key for key, length in running.items() if length > made]
        if alive:
            contexts = sum(prompt + 1 + made for prompt, _ in alive)
            expected += 1.0 + 0.25 * len(alive) + 0.5 * contexts
    assert clock.now - begun == pytest.approx(expected)


def test_the_time_scale_shortens_all_of_it(trace: str) -> None:
    took = []
    for scale in (1.0, 0.001):
        engine, clock = engine_of(trace, time_scale=scale, weight_load_seconds=50.0)
        assert clock.now - 100.0 == pytest.approx(50.0 * scale)
        begun = clock.now
        finish(engine.start(share(), SAMPLING, None))
        took.append(clock.now - begun)
    assert took[1] == pytest.approx(took[0] / 1000)


def test_nothing_is_loaded_before_the_instance_has_started(trace: str) -> None:
    clock = Clock()
    engine = EmulatedEngine(emulation(trace, weight_load_seconds=3.0), 110.0, clock, clock.sleep)
    engine.load(MODEL, WeightsReference(version=0, uri="w"))
    assert clock.now == 113.0


def test_a_late_host_does_not_delay_the_gpu(trace: str) -> None:
    engine, clock = engine_of(trace)
    undisturbed = clock.now
    finish(engine.start(share(), SAMPLING, None))
    undisturbed = clock.now - undisturbed
    engine, clock = engine_of(trace)
    begun = clock.now
    run = engine.start(share(), SAMPLING, None)
    for _ in range(5):
        run.step()
    clock.sleep(7.0)
    finish(run)
    assert clock.now - begun == pytest.approx(undisturbed)


def test_sequences_wait_for_room_in_the_cache_and_in_the_batch(trace: str) -> None:
    engine, _ = engine_of(trace)
    budget = 40
    run = engine.start(share(), SAMPLING, budget)
    while run.running or run.waiting:
        contexts = sum(run.contexts().values())
        before = run.running
        run.step()
        # Only one that is alone, or grew while others were there, goes beyond the budget.
        assert contexts <= budget + before * 24
    engine, _ = engine_of(trace, max_batch=5)
    run = engine.start(share(), SAMPLING, None)
    assert run.room == EngineRoom(sequences=5, kv_tokens=10_000)
    while run.running or run.waiting:
        run.step()
        assert run.running <= 5


def test_what_comes_back_to_an_instance_is_not_prefilled_again(trace: str) -> None:
    numbers = {"step_seconds": 1.0, "sequence_seconds": 0.0, "context_seconds": 0.0, "prefill_token_seconds": 10.0}
    tasks = [task for task in share() if wanted(0, task.prompt, task.index) > 6][:2]
    engine, clock = engine_of(trace, **numbers)
    run = engine.start(tasks, SAMPLING, None)
    for _ in range(5):
        run.step()
    rest = continued(tasks, run.unfinished())
    begun = clock.now
    engine.start(rest, SAMPLING, None).step()
    assert clock.now - begun == pytest.approx(1.0)
    prompts = {task.prompt: task.prompt + 1 for task in tasks}
    forgetful, clock = engine_of(trace, prefix_cache=False, **numbers)
    finish(forgetful.start(tasks, SAMPLING, None))
    begun = clock.now
    forgetful.start(rest, SAMPLING, None).step()
    assert clock.now - begun == pytest.approx(1.0 + 10.0 * (sum(prompts.values()) + 2 * 5))


def test_a_turn_that_ended_is_kept_while_there_is_room(trace: str) -> None:
    numbers = {"step_seconds": 1.0, "sequence_seconds": 0.0, "context_seconds": 0.0, "prefill_token_seconds": 10.0}
    tasks = share(samples=1)

    def prefilled(kv_tokens: int) -> float:
        """Return the tokens that are computed when the first sample comes back with an answer of three tokens."""
        engine, clock = engine_of(trace, **numbers)
        response = [*finish(engine.start(tasks, SAMPLING, kv_tokens))[0, 0].response_tokens, 5, 5, 5]
        back = replace(tasks[0], response_tokens=response, log_probs=[0.0] * len(response))
        begun = clock.now
        engine.start([back], SAMPLING, kv_tokens).step()
        return (clock.now - begun - 1.0) / 10.0

    assert prefilled(1_000) == pytest.approx(3)
    # The other samples needed the room: its prompt alone is kept.
    assert prefilled(32) == pytest.approx(wanted(0, 0, 0) + 3)


def test_new_weights_are_loaded_once_and_forget_what_was_computed(trace: str) -> None:
    engine, clock = engine_of(trace, weight_load_seconds=3.0, prefill_token_seconds=1.0)
    begun = clock.now
    engine.load(MODEL, WeightsReference(version=0, uri="w"))
    assert clock.now == begun
    finish(engine.start(share(1, 1), SAMPLING, None))
    engine.load(MODEL, WeightsReference(version=1, uri="w1"))
    run = engine.start(share(1, 1), SAMPLING, None)
    run.step()
    assert run.computed.prompt == 1


def test_unfinished_responses_keep_what_was_computed_through_new_weights_if_asked(trace: str) -> None:
    numbers = {"step_seconds": 1.0, "sequence_seconds": 0.0, "context_seconds": 0.0, "prefill_token_seconds": 10.0}
    *tasks, fresh = [task for task in share(samples=1) if wanted(0, task.prompt, task.index) > 6][:3]
    contexts = sum(len(task.prompt_tokens) + 5 for task in tasks)

    def prefilled(keep: bool, others: list[SequenceTask]) -> float:
        """Return the tokens that are computed once there are newer weights, after five of each response."""
        engine, clock = engine_of(trace, **numbers)
        run = engine.start(tasks, SAMPLING, None, keep_kv_cache=keep)
        for _ in range(5):
            run.step()
        rest = continued(tasks, run.unfinished())
        engine.load(MODEL, WeightsReference(version=1, uri="w1"))
        begun = clock.now
        engine.start([*rest, *others], SAMPLING, None, keep_kv_cache=keep).step()
        return (clock.now - begun - 1.0) / 10.0

    assert prefilled(True, []) == pytest.approx(0)
    assert prefilled(False, []) == pytest.approx(contexts)
    # A response that begins now has nothing of the older weights.
    assert prefilled(True, [fresh]) == pytest.approx(len(fresh.prompt_tokens))


# --- what it refuses ---------------------------------------------------------------------------------------------


def test_a_sequence_that_cannot_fit_is_refused_with_the_remedy(trace: str) -> None:
    engine, _ = engine_of(trace)
    with pytest.raises(TaskError, match=r"holds 20; raise generation\.kvBudgetTokens"):
        engine.start(share(), SAMPLING, 20)


def test_a_prompt_that_is_not_in_the_trace_is_named(trace: str) -> None:
    engine, _ = engine_of(trace)
    with pytest.raises(TaskError, match="prompt 8 is not in the trace, which has 8 prompts"):
        engine.start([SequenceTask(8, 0, [1], 0)], SAMPLING, None)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "has no column 'prompt'"),
        ({name: [] for name in ("prompt", "epoch", "sample", "prompt_tokens", "response_tokens")}, "is empty"),
        ({"prompt": [0], "epoch": [0], "sample": [0], "prompt_tokens": [1], "response_tokens": [-3]}, "is -3 in one"),
        ({"prompt": [0], "epoch": [0], "sample": [0], "prompt_tokens": [1], "response_tokens": [1.5]}, "whole number"),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, columns: dict[str, list[float]], message: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "trace.parquet"
    kinds = {name: pa.array(column, pa.int64() if not column else None) for name, column in columns.items()}
    pq.write_table(pa.table(kinds), file)
    with pytest.raises(TaskError, match=message) as error:
        engine_of(str(file))
    assert error.value.reason == "data_invalid"
    assert str(file) in str(error.value)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere holds no trace; name a Parquet file"):
        engine_of(str(tmp_path / "nowhere"))


def test_an_emulated_instance_imports_nothing_heavy(trace: str) -> None:
    code = f"""
import sys, rlhfless_functions.serving.emulation, rlhfless_functions.serving.instance
from rlhfless_functions.data.traces import read_trace_rows
read_trace_rows({trace!r})
print(sorted({{"torch", "transformers", "pandas", "datasets"}} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_sequence_that_acts_ends_with_each_turn_and_goes_on_behind_what_it_was_given(tmp_path: Path) -> None:
    column, uri = np.array([0]), str(tmp_path / "acting.parquet")
    acted = {"turns": np.array([2]), "given_tokens": np.array([4]), "away_milliseconds": np.array([0])}
    write_trace_rows(uri, TraceRows(column, column, column, np.array([3]), np.array([11]), **acted))
    engine, _ = engine_of(uri, acts=True)
    task = SequenceTask(0, 0, [7] * 3, sample_seed(0, "training", 1, 0, 0))
    first = finish(engine.start([task], SAMPLING, None))[0, 0]
    assert len(first.response_tokens) == 5, "the first turn"
    behind = [*first.response_tokens, *[2] * 4]
    second = finish(engine.start([replace(task, response_tokens=behind, log_probs=[0.0] * 9)], SAMPLING, None))[0, 0]
    assert len(second.response_tokens) == 15 and second.response_tokens[:9] == behind
    whole, _ = engine_of(uri)
    assert len(finish(whole.start([task], SAMPLING, None))[0, 0].response_tokens) == 11, "no environment, no turns"


def test_a_trace_without_turns_is_no_trace_of_an_environment(trace: str) -> None:
    with pytest.raises(
        TaskError, match=r"rehearsal\.trace: .* has no turns, .*; name the folder of a run with an envir"
    ):
        engine_of(trace, acts=True)
