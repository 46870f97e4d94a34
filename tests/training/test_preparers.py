"""Whole jobs that prepare on two instances at a time. The weights are those of one instance, also after kills."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from rlhfless_functions.api import Event, PrepareRequest, RunRequest, Started
from rlhfless_operator.platforms.local.platform import LocalPlatform
from tests.training.asynchronous.test_loop import AHEAD, check_journal, check_prompts, replayed
from tests.training.whole_jobs import (
    MakeJob,
    assert_same_final_weights,
    assume_measured,
    folder_of,
    half_written,
    records_of,
    run_job,
)

TWO = {"preparation": {"instances": {"min": 2, "max": 2}}}


class Side:
    """A local platform that stops the process of the first chunk until a second chunk is prepared beside it.

    Args:
        then: the signal that the process gets then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: signal.Signals = signal.SIGCONT) -> None:
        self.attempts: dict[tuple[int, str], list[str]] = {}
        """The instance of each attempt at each chunk."""
        self.at_work: set[tuple[int, str]] = set()
        self.most = 0
        self._then = then
        self._second = asyncio.Event()
        self._run = LocalPlatform.run

        async def run(platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
            async with aclosing(self._watched(platform, request)) as events:
                async for event in events:
                    yield event

        monkeypatch.setattr(LocalPlatform, "run", run)

    async def _watched(self, platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
        chunk = request.key.step, request.key.part
        async with aclosing(self._run(platform, request)) as events:
            try:
                async for event in events:
                    if isinstance(request, PrepareRequest) and isinstance(event, Started):
                        await self._starts(platform, chunk, event.instance)
                    yield event
            finally:
                self.at_work.discard(chunk)

    async def _starts(self, platform: LocalPlatform, chunk: tuple[int, str], instance: str) -> None:
        first = not self.attempts
        self.attempts.setdefault(chunk, []).append(instance)
        self.at_work.add(chunk)
        self.most = max(self.most, len(self.at_work))
        if first:
            pid = platform._processes[instance].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await self._second.wait()
            os.kill(pid, self._then)
        else:
            self._second.set()


def check_first_chunk_again(side: Side) -> None:
    """That the chunk whose instance was killed was prepared by another one, and no other chunk was prepared twice."""
    first, *others = side.attempts.values()
    assert len(first) == 2
    assert first[0] != first[1]
    assert all(len(attempts) == 1 for attempts in others)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_two_instances_prepare_what_one_does_though_one_is_killed(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tiny_job("one", steps=2)
    run_job(one)
    two = tiny_job("two", **TWO, steps=2)
    side = Side(monkeypatch, signal.SIGKILL)
    assert run_job(two)["phase"] == "Succeeded"
    assert side.most == 2
    check_first_chunk_again(side)
    assert_same_final_weights(two, one)
    assert half_written(folder_of(two)) == []
    assert [record["metrics"]["preparation/instances"] for record in records_of(one)] == [1, 1]
    assert [record["metrics"]["preparation/instances"] for record in records_of(two)] == [2, 2]
    assert [record["plan"]["preparers_reason"] for record in records_of(two)] == ["", ""], "there was no choice"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_an_asynchronous_job_prepares_on_as_many_instances_as_its_plan_chooses(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    assume_measured(monkeypatch, {"preparation/token": 1.0, "learning": 100.0})
    preparation = {"instances": {"min": 1, "max": 3}}
    file = tiny_job("ahead", **AHEAD, preparation=preparation, planning={"policy": "cost"}, steps=4)
    side = Side(monkeypatch, signal.SIGKILL)
    assert run_job(file)["phase"] == "Succeeded"
    check_first_chunk_again(side)
    check_journal(file, 4, 1)
    check_prompts(file)
    assert "4 steps taken again: the same weights bit for bit" in replayed(file)
    for record in records_of(file):
        # 16 samples of a few tokens each: several hundred instance-seconds of preparation.
        assert record["metrics"]["preparation/instances"] == record["plan"]["preparers"] == side.most == 3
        assert "instance-seconds a step, and learning takes 100 s" in record["plan"]["preparers_reason"]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize(
    "options",
    [
        {"batch": {"minibatchSamples": None}},
        {"algorithm": {"name": "dapo", "dynamicSamplingRounds": 1}},
    ],
    ids=["pieces", "rounds"],
)
def test_two_instances_prepare_for_a_learner_that_follows_and_in_rounds(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    side = Side(monkeypatch, signal.SIGKILL)
    file = tiny_job("two", **{**TWO, "planning": {"policy": "cost"}, "steps": 2, **options})
    assert run_job(file)["phase"] == "Succeeded"
    assert [record["metrics"]["preparation/instances"] for record in records_of(file)] == [2, 2]
    assert side.most == 2
    check_first_chunk_again(side)
    records = [record["metrics"] for record in records_of(file)]
    assert [record["batch/samples"] for record in records] == [16, 16], "each group is learnt from once"
