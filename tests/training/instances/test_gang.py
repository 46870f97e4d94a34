"""Instances that learn together: asked as a whole, and fewer of them where some are lost or don't come."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions.api import Done, Event, Failed, FailureReason, Heartbeat, Preload, Started, Waiting
from rlhfless_operator.job.instance_ranges import LearnerRange
from rlhfless_operator.platforms.base import InstanceLostError, TaskFailedError
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.training.instances import gang
from rlhfless_operator.training.instances.gang import GangBrokenError, GangIncompleteError, GangSize, run_together
from rlhfless_operator.training.stages.learner_listener import LearnerListener
from tests.processes import named
from tests.training.whole_jobs import MakeJob, final_weights, folder_of, records_of, run_job, status_of

FOR_EVER = 3600.0

Script = list[Event | Exception | float]


class Scripted:
    """A platform whose n-th request gets the n-th script: events, errors, and seconds to wait for the next."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = scripts
        self.asked = 0
        self.cut: list[int] = []

    async def run(self, request: Any) -> AsyncGenerator[Event, None]:
        number, self.asked = self.asked, self.asked + 1
        try:
            for line in self.scripts[number]:
                if isinstance(line, Exception):
                    raise line
                if isinstance(line, float):
                    await asyncio.sleep(line)
                else:
                    yield line
        except (GeneratorExit, asyncio.CancelledError):
            self.cut.append(number)
            raise


STARTED = Started(instance="pod")


def failed(reason: FailureReason, message: str = "told", *, retryable: bool = True) -> TaskFailedError:
    return TaskFailedError(Failed(reason=reason, message=message, retryable=retryable))


async def together(platform: Scripted, within: float = FOR_EVER, stall: float = FOR_EVER) -> dict[str, Any]:
    requests: Any = [None] * len(platform.scripts)
    listener = lambda: lambda event: None  # noqa: E731
    return await run_together(platform, requests, within=within, stall=stall, listener=listener)  # type: ignore[arg-type]


def still(*seconds: float) -> Script:
    """Heartbeats of an instance that has used no CPU for so long."""
    return [part for each in seconds for part in (Heartbeat(still_seconds=each), 0.01)]


async def test_the_result_is_that_of_any_of_them() -> None:
    done = Done(result={"metrics": 1})
    assert await together(Scripted([STARTED, done], [STARTED, 0.01, done])) == {"metrics": 1}


async def test_those_that_came_are_cut_when_others_do_not_come() -> None:
    platform = Scripted([STARTED, FOR_EVER], [FOR_EVER], [STARTED, FOR_EVER])
    with pytest.raises(GangIncompleteError) as caught:
        await together(platform, within=0.05)
    assert caught.value.there == 2
    assert sorted(platform.cut) == [0, 1, 2]


async def test_nobody_is_late_before_the_first_has_come() -> None:
    done = Done(result={})
    assert await together(Scripted([0.2, STARTED, done], [0.2, STARTED, done]), within=0.1) == {}


async def test_an_instance_that_waits_for_another_is_not_hung() -> None:
    done = Done(result={})
    platform = Scripted(
        [STARTED, *still(100.0, 130.0, 200.0, 300.0), done], [STARTED, *still(0.0, 5.0, 119.0, 0.0), 0.05, done]
    )
    assert await together(platform, stall=120.0) == {}


async def test_a_gang_none_of_which_works_is_hung() -> None:
    platform = Scripted([STARTED, *still(115.0, 130.0), FOR_EVER], [STARTED, *still(0.0, 110.0, 121.0), FOR_EVER])
    with pytest.raises(GangBrokenError, match="nothing has worked in any of 2 learning instances for 121 s") as caught:
        await together(platform, stall=120.0)
    assert caught.value.lost == 0, "nobody knows which"
    assert sorted(platform.cut) == [0, 1]


async def test_a_loss_cuts_the_others_and_tells_how_many_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "_LAST_WORDS_SECONDS", 0.1)
    platform = Scripted(
        [STARTED, failed("internal", "another is gone")],
        [STARTED, 0.02, InstanceLostError("killed")],
        [STARTED, FOR_EVER],
    )
    with pytest.raises(GangBrokenError, match="killed") as caught:
        await together(platform)
    assert caught.value.lost == 1
    assert platform.cut == [2]


async def test_what_cannot_be_mended_is_told_before_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Scripted([STARTED, InstanceLostError("killed")], [STARTED, failed("bad_request", retryable=False)])
    with pytest.raises(GangBrokenError, match="told"):
        await together(platform)


def test_a_gang_is_never_smaller_than_allowed_and_recovers() -> None:
    size = GangSize(LearnerRange(min=2, max=4))
    assert size.now == 4
    assert (size.fall_to(3), size.now) == (True, 3)
    assert (size.fall_to(1), size.now) == (False, 2)
    size.recover()
    assert size.now == 4


def test_a_gang_waits_less_and_less_often_for_instances_that_do_not_come() -> None:
    size = GangSize(LearnerRange(min=1, max=2))
    tries = []
    for checkpoint in range(20):
        if size.now == 2:
            tries.append(checkpoint)
            assert size.miss(1)
        size.recover()
    assert tries == [0, 1, 3, 7, 15]

    while size.now == 1:
        size.recover()
    size.met(2)
    assert size.miss(1)
    size.recover()
    assert size.now == 2, "once they have come, an absence is the first again"


def test_a_gang_is_as_large_as_was_chosen_but_for_what_does_not_come() -> None:
    size = GangSize(LearnerRange(min=1, max=4))
    size.choose(2)
    assert (size.now, size.chosen) == (2, 2)
    size.recover()
    assert size.now == 2
    assert size.miss(1)
    size.choose(4)
    assert (size.now, size.chosen) == (1, 4), "they are not asked for before the next checkpoint"
    size.recover()
    assert size.now == 4
    size.choose(9)
    assert size.now == 4


def test_a_gang_that_lacks_memory_is_larger_from_then_on() -> None:
    size = GangSize(LearnerRange(min=1, max=4))
    size.choose(1)
    assert (size.exceed(1, "no room"), size.now, size.chosen) == (True, 2, 2)
    size.choose(1)
    assert size.now == 2
    assert not size.exceed(4, "no room")


def test_a_gang_that_lacks_memory_and_instances_is_told_of_both() -> None:
    size = GangSize(LearnerRange(min=1, max=4))
    size.choose(1)
    assert size.absence(0, 1).endswith("learning.instances.min is 1; lower it, or make room for more")
    size.exceed(1, "step 3: no room. Lower batch.microbatchTokens")
    assert not size.miss(1)
    assert size.absence(1, 2) == (
        "1 of 2 learning instances came within learning.gangTimeout, and fewer than 2 have too little memory"
        " (step 3: no room. Lower batch.microbatchTokens); or make room for 2"
    )


# Adam divides a gradient by its own size: with a tiny epsilon, rounding alone would decide where gradients vanish.
GIVEN: dict[str, Any] = {
    "optimizer": {"learningRate": 1e-3, "epsilon": 1e-3},
    "checkpoints": {"everySteps": 1},
}
STEPS = 3


def job_file(tiny_job: MakeJob, name: str, instances: int, steps: int = STEPS, **learning: Any) -> Path:
    given = {"processes": 1, "instances": {"max": instances}, **learning}
    return tiny_job(name, steps=steps, learning=given, **GIVEN)


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], steps: int = STEPS) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=1e-6 * steps, msg=name)


def killing(monkeypatch: pytest.MonkeyPatch, steps: range) -> dict[int, str]:
    """Kill an instance in the middle of each of some steps; the name of each, by step."""
    killed: dict[int, str] = {}
    hear = LearnerListener.__call__

    def hear_and_kill(self: Any, event: Event) -> None:
        hear(self, event)
        met = isinstance(event, Waiting) and not event.waiting
        if met and self.step in steps and self.step not in killed:
            killed[self.step] = self._instance
            (process,) = named(self._instance)
            os.kill(process.pid, signal.SIGKILL)

    make = LearnerListener.__init__

    def note_step(self: Any, journal: Any) -> None:
        make(self, journal)
        self.step = journal.status.step + 1

    monkeypatch.setattr(LearnerListener, "__init__", note_step)
    monkeypatch.setattr(LearnerListener, "__call__", hear_and_kill)
    return killed


@pytest.mark.slow
def test_a_job_with_two_learners_loses_one_in_mid_step_and_comes_to_the_weights_of_one(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = job_file(tiny_job, "alone", 1)
    run_job(alone)
    file = job_file(tiny_job, "together", 2)
    killed = killing(monkeypatch, range(2, STEPS + 1))
    summary = run_job(file)
    assert (summary["phase"], summary["steps"]) == ("Succeeded", STEPS)
    counts = [record["metrics"]["learning/instances"] for record in records_of(file)]
    assert killed
    assert counts[0] == 2
    assert 1 in counts[1:], "a step was taken again with the instance that was there"
    assert_close(final_weights(file), final_weights(alone))
    spans = [json.loads(line) for line in (folder_of(file) / "ledger.jsonl").read_text().splitlines()]
    busy = {span["instance"] for span in spans if span["stage"] == "learning" and span["state"] == "busy"}
    assert len(busy) >= 2, "each instance is charged"


@pytest.mark.nightly
def test_a_job_goes_on_with_one_learner_where_the_second_does_not_come(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = LocalPlatform.hold
    held = []

    async def hold_one(self: LocalPlatform, stage: Any, count: int, preload: Preload | None = None) -> None:
        if stage == "learning":
            held.append(count)
        await hold(self, stage, min(count, 1) if stage == "learning" else count, preload)

    monkeypatch.setattr(LocalPlatform, "hold", hold_one)
    file = job_file(tiny_job, "lacking", 2, steps=1, gangTimeout="1s")
    summary = run_job(file)
    assert (summary["phase"], summary["steps"]) == ("Succeeded", 1)
    assert [record["metrics"]["learning/instances"] for record in records_of(file)] == [1]
    assert held.index(2) < held.index(1), "what did not come is not asked for any longer"
    assert 2 not in held[held.index(1) :]


@pytest.mark.slow
def test_a_gang_that_may_not_be_smaller_says_what_to_do(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = LocalPlatform.hold

    async def hold_one(self: LocalPlatform, stage: Any, count: int, preload: Preload | None = None) -> None:
        await hold(self, stage, min(count, 1) if stage == "learning" else count, preload)

    monkeypatch.setattr(LocalPlatform, "hold", hold_one)
    given = {"processes": 1, "instances": {"min": 2, "max": 2}, "gangTimeout": "1s"}
    file = tiny_job("never", steps=1, learning=given, limits={"retries": 1})
    with pytest.raises(
        Exception, match=r"1 of 2 .* came within learning\.gangTimeout, and learning\.instances\.min is 2"
    ):
        run_job(file)


SMALL_MEMORY = """
import sys

if "rlhfless_functions.serving.fork_server" in sys.orig_argv:
    import torch

    from rlhfless_functions.learning import learner

    def too_large(take):
        def taken(state, batch, request, *rest):
            if request.gang is None:
                raise torch.OutOfMemoryError("tried to allocate 20 GiB")
            return take(state, batch, request, *rest)

        return taken

    learner.train_step = too_large(learner.train_step)
"""
"""What makes the devices of learning instances too small for one of them alone."""


def missing_second(monkeypatch: pytest.MonkeyPatch, until: Callable[[], bool]) -> None:
    """Have no more than one learning instance come until something has happened."""
    hold = LocalPlatform.hold

    async def hold_one(self: LocalPlatform, stage: Any, count: int, preload: Preload | None = None) -> None:
        await hold(self, stage, min(count, 1) if stage == "learning" and not until() else count, preload)

    monkeypatch.setattr(LocalPlatform, "hold", hold_one)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a job tells in passing."""
    told: list[str] = []
    note = LiveProgress.note

    def tell(self: LiveProgress, text: str) -> None:
        told.append(text)
        note(self, text)

    monkeypatch.setattr(LiveProgress, "note", tell)
    return told


@pytest.mark.slow
@pytest.mark.usefixtures("cold_start")
def test_a_gang_that_became_too_small_for_its_memory_is_larger_again_or_says_what_to_do(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    """The second instance does not come at first, and one alone runs out of memory."""
    (tmp_path / "sitecustomize.py").write_text(SMALL_MEMORY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    missing_second(monkeypatch, lambda: any("20 GiB" in note for note in notes))
    file = job_file(tiny_job, "small", 2, steps=1, gangTimeout="2s")
    summary = run_job(file)
    assert (summary["phase"], summary["steps"]) == ("Succeeded", 1)
    assert [record["metrics"]["learning/instances"] for record in records_of(file)] == [2]
    chosen = status_of(file)["learners"]
    assert (chosen["instances"], chosen["reason"]) == (2, "1 had too little memory")
    assert [word for note in notes for word in ("going on with 1", "taken again with 2") if word in note] == [
        "going on with 1",
        "taken again with 2",
    ]
