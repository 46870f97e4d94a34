"""What the functions of a rehearsal charge for sleeping and waking."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    BatchReference,
    Event,
    JournalledPiece,
    LearnRequest,
    PrepareRequest,
    PrepareResult,
    SampleTask,
    SaveRequest,
    TakeUpRequest,
    TaskKey,
    WeightsReference,
    piece_uri,
)
from rlhfless_functions.data.traces import TraceRows, write_trace_rows
from rlhfless_functions.learning import pieces
from rlhfless_functions.learning.pieces import LetGoError
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.serving.emulation import EmulatedLearner, EmulatedPreparer
from rlhfless_functions.settings import SamplingSettings
from rlhfless_functions.settings.emulation import EmulationSettings

TOKENS = 30
"""Of the one sample, its prompt's among them."""
SAMPLES = [SampleTask(prompt=0, index=0)]


class Clock:
    """Time that passes while somebody sleeps, and not otherwise."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(time, "sleep", made.sleep)
    return made


@pytest.fixture
def emulation(tmp_path: Path) -> EmulationSettings:
    column = np.array([0])
    trace = TraceRows(column, column, column, np.array([10]), np.array([TOKENS - 10]))
    write_trace_rows(str(tmp_path / "trace.parquet"), trace)
    return EmulationSettings(
        trace=str(tmp_path / "trace.parquet"),
        prompts_per_step=1,
        step_seconds=0.0,
        sequence_seconds=0.0,
        context_seconds=0.0,
        prefill_token_seconds=0.0,
        kv_tokens=1000,
        preparation_token_seconds=0.1,
        preparation_load_seconds=2.0,
        learning_token_seconds=1.0,
        learning_move_seconds=4.0,
        learning_load_seconds=3.0,
        learning_store_seconds=18.0,
        time_scale=0.5,
    )


def prepare() -> PrepareRequest:
    sampling = SamplingSettings(max_prompt_tokens=100, max_response_tokens=100)
    key = TaskKey(job_uid="u", step=1, stage="preparation", part="p", attempt=0)
    return PrepareRequest.model_construct(key=key, samples=SAMPLES, sampling=sampling, sink="s")


def batch_of(step: int) -> BatchReference:
    return BatchReference(step=step, parts=[], samples=SAMPLES)


def learn(step: int = 1, **given: Any) -> LearnRequest:
    sampling = SamplingSettings(max_prompt_tokens=100, max_response_tokens=100)
    base = WeightsReference(version=step - 1, uri="w")
    fields = {"batch": batch_of(step), "base": base, "checkpoint": None, "replay": [], **given}
    return LearnRequest.model_construct(**fields, sampling=sampling, publish="w")


def save(version: int) -> SaveRequest:
    key = TaskKey(job_uid="u", step=version, stage="learning", part="save", attempt=0)
    return SaveRequest(key=key, result="r", version=version, checkpoint="c")


def seconds_of(clock: Clock, task: Callable[[TaskContext], object], *, asleep: bool) -> tuple[float, list[float]]:
    """How long a task took, and when it told that it was awake."""
    begun, told = clock.now, list[float]()

    def emit(event: Event) -> None:
        told.append(clock.now - begun)

    task(TaskContext(emit=emit, asleep=asleep))
    return clock.now - begun, told


def test_learning_takes_its_time_for_each_piece_and_goes_on_after_it_was_let_go(
    clock: Clock, emulation: EmulationSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [SampleTask(prompt=0, index=0), SampleTask(prompt=0, index=0)]
    request = learn().model_copy(
        update={"batch": BatchReference(step=1, parts=[], samples=samples), "following": str(tmp_path / "pieces")}
    )
    learner, letting_go = EmulatedLearner(emulation), TaskContext(emit=lambda event: None)

    def publish(number: int) -> None:
        piece = JournalledPiece(samples=samples[:1], parts=[])
        artifacts.write_json(piece_uri(str(tmp_path / "pieces"), number), piece.model_dump(mode="json"))

    def look(seconds: float) -> None:
        clock.sleep(seconds)
        letting_go.stop("cut")

    monkeypatch.setattr(pieces, "monotonic", lambda: clock.now)
    monkeypatch.setattr(pieces, "sleep", look)
    publish(0)
    with pytest.raises(LetGoError):
        learner.run(request, letting_go)
    assert clock.now == pytest.approx(0.5 * (3.0 + TOKENS) + pieces.LOOK_SECONDS)
    publish(1)
    begun = clock.now
    result = learner.run(request, TaskContext(emit=lambda event: None))
    assert clock.now - begun == pytest.approx(0.5 * TOKENS), "the first piece is not learnt from again"
    assert result.metrics == {
        "seconds/train": pytest.approx(0.5 * TOKENS),
        "seconds": pytest.approx(0.5 * TOKENS),
        "seconds/wait": 0.0,
        "tokens": TOKENS,
    }


def test_learning_that_waits_for_nothing_ends_without_a_piece(
    clock: Clock, emulation: EmulationSettings, tmp_path: Path
) -> None:
    batch = BatchReference(step=1, parts=[], samples=[SampleTask(prompt=0, index=0)])
    request = learn().model_copy(update={"batch": batch, "following": str(tmp_path / "pieces"), "waits": False})
    with pytest.raises(LetGoError) as caught:
        EmulatedLearner(emulation).run(request, TaskContext(emit=lambda event: None))
    assert caught.value.reason == "awaits_pieces"


def test_preparation_reads_its_models_before_its_first_task_and_after_each_sleep(
    clock: Clock, emulation: EmulationSettings
) -> None:
    preparer, loads = EmulatedPreparer(emulation), list[float]()

    def run(context: TaskContext) -> None:
        result = preparer.run(prepare(), context)
        assert isinstance(result, PrepareResult)
        loads.append(result.load_seconds)

    work, load = 0.5 * 0.1 * TOKENS, 0.5 * 2.0
    assert seconds_of(clock, run, asleep=False) == (pytest.approx(work + load), [])
    assert seconds_of(clock, run, asleep=False) == (pytest.approx(work), [])
    preparer.sleep()
    assert seconds_of(clock, run, asleep=True) == (pytest.approx(work + load), [pytest.approx(load)])
    assert loads == [pytest.approx(load), 0.0, pytest.approx(load)]


def test_a_learners_state_goes_to_the_hosts_memory_and_comes_back(clock: Clock, emulation: EmulationSettings) -> None:
    learner = EmulatedLearner(emulation)

    learner.run(learn(1), TaskContext(emit=lambda event: None))

    def run(context: TaskContext) -> None:
        learner.run(learn(2), context)

    work, move = 0.5 * TOKENS, 0.5 * 4.0
    assert seconds_of(clock, lambda context: learner.sleep(), asleep=False) == (pytest.approx(move), [])
    assert seconds_of(clock, run, asleep=True) == (pytest.approx(work + move), [pytest.approx(move)])


def test_a_fresh_learner_reads_the_checkpoint_and_repeats_the_steps_since(
    clock: Clock, emulation: EmulationSettings
) -> None:
    learner, context = EmulatedLearner(emulation), TaskContext(emit=lambda event: None)
    first = learner.run(learn(1), context)
    assert first.metrics["seconds/load"] == pytest.approx(0.5 * 3.0), "the model as given"
    second = learner.run(learn(2), context)
    assert "seconds/load" not in second.metrics
    assert clock.now == pytest.approx(0.5 * (3.0 + 2 * TOKENS))
    begun = clock.now
    fresh = EmulatedLearner(emulation).run(learn(3, checkpoint="c", replay=[batch_of(2)]), context)
    assert clock.now - begun == pytest.approx(0.5 * (18.0 + 2 * TOKENS))
    assert fresh.metrics["seconds/load"] == pytest.approx(0.5 * 18.0)
    assert fresh.metrics["seconds/replay"] == pytest.approx(0.5 * TOKENS)


def test_a_checkpoint_takes_its_time_with_a_step_and_by_itself(clock: Clock, emulation: EmulationSettings) -> None:
    learner, context = EmulatedLearner(emulation), TaskContext(emit=lambda event: None)
    learner.run(learn(1, save_checkpoint="c"), context)
    assert clock.now == pytest.approx(0.5 * (3.0 + TOKENS + 18.0))
    saved = learner.run(save(1), context)
    assert saved.seconds == pytest.approx(0.5 * 18.0)
    with pytest.raises(TaskError, match="does not hold version 2"):
        learner.run(save(2), context)


def test_a_state_that_was_taken_up_ahead_is_there_when_the_step_comes(
    clock: Clock, emulation: EmulationSettings
) -> None:
    learner, context = EmulatedLearner(emulation), TaskContext(emit=lambda event: None)
    step = learn(3, checkpoint="c", replay=[batch_of(2)])
    taken = learner.run(TakeUpRequest.model_construct(step=step), context)
    assert (taken.load_seconds, taken.replay_seconds) == (pytest.approx(0.5 * 18.0), pytest.approx(0.5 * TOKENS))
    begun = clock.now
    result = learner.run(step, context)
    assert clock.now - begun == pytest.approx(0.5 * TOKENS)
    assert "seconds/load" not in result.metrics
