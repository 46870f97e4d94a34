"""Jobs whose learners are gangs, on one pool: each gang has all of its GPUs or none."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import GenerationRequest, LearnRequest, RunRequest
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from tests.clusters.emulated_functions import Emulation
from tests.controller.api_server_jobs import jobs as jobs  # The fixtures.
from tests.controller.api_server_jobs import server as server
from tests.controller.operator_harness import Jobs, running_operator, wait_for
from tests.jobs import small_job

GPUS, GANG = 6, 4


def with_gpus(count: int) -> dict[str, Any]:
    return {"pods": {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}}


def gang_job(name: str, stages_before: int, **spec: Any) -> dict[str, Any]:
    """A job with learners of a GPU each, which wait for each other for an hour; and GPUs of the stages before."""
    return small_job(
        name,
        generation={"instances": {"min": 1, "max": 1}, **with_gpus(stages_before)},
        preparation=with_gpus(stages_before),
        learning={"processes": 1, "instances": {"min": GANG, "max": GANG}, "gangTimeout": "1h", **with_gpus(1)},
        **spec,
    )


class Meetings:
    """Learners of a gang that end when all of them are there, and generation that ends when it may."""

    def __init__(self) -> None:
        self.generating: list[RunRequest] = []
        self.may_end = threading.Event()
        self.there: Counter[str] = Counter()
        self.incomplete_at_once = 0
        """The most gangs of which some were there and others not."""

    def came(self, request: RunRequest) -> None:
        if isinstance(request, LearnRequest) and request.gang is not None:
            self.there[request.gang.meeting] += 1
            self.incomplete_at_once = max(self.incomplete_at_once, len(self.incomplete()))

    def incomplete(self) -> list[str]:
        return [meeting for meeting, count in self.there.items() if count < GANG]

    def holding(self, request: RunRequest) -> bool:
        if isinstance(request, LearnRequest) and request.gang is not None:
            return self.there[request.gang.meeting] < GANG
        if isinstance(request, GenerationRequest) and "/filler/" in request.result:
            self.generating.append(request)
            return not self.may_end.is_set()
        return False


def test_gangs_of_two_jobs_on_six_gpus_learn_one_after_the_other(jobs: Jobs, tmp_path: Path) -> None:
    meetings = Meetings()
    emulation = Emulation(before=meetings.came, holding=meetings.holding)
    pools = {"default": PoolSettings(gpus=GPUS)}
    with running_operator(tmp_path, emulation, pools=pools):
        # Another job has all GPUs until both gangs wait. Then all become free at once.
        filler = {"instances": {"min": 2, "max": 2}, **with_gpus(GPUS // 2)}
        jobs.apply(small_job("filler", generation=filler, planning={"policy": "even"}, steps=1))
        wait_for(lambda: len({request.key.part for request in meetings.generating}) == 2)
        for name in ("a", "b"):
            jobs.apply(gang_job(name, stages_before=0))
        for name in ("a", "b"):
            jobs.wait(name, lambda status: status.get("stage") == "learning")
        assert not meetings.there
        meetings.may_end.set()
        for name in ("filler", "a", "b"):
            assert jobs.wait_phase(name, "Succeeded", "Failed")["phase"] == "Succeeded"
    assert sorted(meetings.there.values()) == [GANG] * 6, "three steps of each job, with whole gangs"
    assert meetings.incomplete_at_once == 1, "one gang came after the other"


@pytest.mark.parametrize("settings", [{}, {"async": {"maxStaleness": 1}}], ids=["synchronous", "asynchronous"])
def test_jobs_with_gangs_that_need_the_whole_pool_all_come_to_their_end(
    jobs: Jobs, tmp_path: Path, settings: dict[str, Any]
) -> None:
    meetings = Meetings()
    emulation = Emulation(task_seconds=0.02, before=meetings.came, holding=meetings.holding)
    pools = {"default": PoolSettings(gpus=GPUS)}
    with running_operator(tmp_path, emulation, pools=pools):
        for name in ("a", "b", "c"):
            jobs.apply(gang_job(name, stages_before=1, steps=4, **settings))
        for name in ("a", "b", "c"):
            assert jobs.wait_phase(name, "Succeeded", "Failed")["phase"] == "Succeeded"
    assert sorted(meetings.there.values()) == [GANG] * 12
