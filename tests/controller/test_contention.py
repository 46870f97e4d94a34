"""Who shares a pool with a job, and what a driver is told of it."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from rlhfless_functions.api import Event, RunRequest, Stage, Started
from rlhfless_operator.controller.contention import PoolMembers, WantingPlatform
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.pools.contention import ALONE, Contention
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from tests.jobs import small_job

GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}


def job(**spec: object) -> RLHFJob:
    return RLHFJob.model_validate(small_job(**{"pods": GPU, **spec}))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def members(clock: Clock, **pool: object) -> PoolMembers:
    pools = {"default": PoolSettings(gpus=8, **pool), "other": PoolSettings(gpus=8)}  # type: ignore[arg-type]
    return PoolMembers(ClusterSettings(functions_image="f", pools=pools), clock)


@pytest.mark.parametrize("pool", [{}, {"device_class": "gpu.test"}])
def test_jobs_of_a_pool_count_for_as_long_as_their_drivers_work(pool: dict[str, object]) -> None:
    jobs = members(Clock(), **pool)
    with jobs.joined(job(), "team") as one:
        assert jobs.contention(one) == ALONE
        with jobs.joined(job(), "team"):
            assert jobs.contention(one) == Contention(0.5, 4)
        assert jobs.contention(one) == ALONE


def test_jobs_of_other_pools_and_without_gpus_do_not_count() -> None:
    jobs = members(Clock())
    with jobs.joined(job(), "team") as one, jobs.joined(job(pool="other"), "team"), jobs.joined(job(pods={}), "team"):
        assert jobs.contention(one) == ALONE
    with jobs.joined(job(pool="unknown"), "team") as one:
        assert jobs.contention(one) == ALONE


def test_within_a_quota_the_jobs_of_the_namespace_count_more() -> None:
    jobs = members(Clock(), namespaces={"small": 2})
    with (
        jobs.joined(job(), "large") as large,
        jobs.joined(job(), "small") as small,
        jobs.joined(job(), "small"),
    ):
        assert jobs.contention(large) == Contention(2 / 3, 3)
        assert jobs.contention(small) == Contention(2 / 3, 1)


def test_tasks_that_wait_or_work_are_what_a_job_wants() -> None:
    clock = Clock()
    jobs = members(clock)
    with jobs.joined(job(), "team") as one, jobs.joined(job(), "team") as other:
        stages: tuple[Stage, ...] = ("generation", "generation", "learning")
        contexts = [other.wanting(stage) for stage in stages]
        for context in contexts:
            context.__enter__()
        clock.now = 7200.0
        assert jobs.contention(one) == Contention(pytest.approx(3 / 8, abs=0.01), 5)
        assert jobs.contention(other) == Contention(pytest.approx(0.0, abs=0.01), 8)
        for context in contexts:
            context.__exit__(None, None, None)
        clock.now += 36_000.0
        assert jobs.contention(one) == Contention(pytest.approx(0.0, abs=0.01), 8)


async def test_a_task_is_wanted_from_being_asked_for_until_its_stream_has_ended() -> None:
    clock = Clock()
    jobs = members(clock)

    class Working:
        """A platform whose every task takes an hour."""

        async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
            clock.now += 3600.0
            yield Started(instance="g")

    task = SimpleNamespace(key=SimpleNamespace(stage="generation"))
    with jobs.joined(job(), "team") as one, jobs.joined(job(), "team") as other:
        platform = WantingPlatform(Working(), other)  # type: ignore[arg-type]
        for _ in range(2):
            assert [event async for event in platform.run(task)] == [Started(instance="g")]  # type: ignore[arg-type]
        assert jobs.contention(one).wanted == pytest.approx(1 / 8, abs=0.01)
        clock.now += 36_000.0
        assert jobs.contention(one).wanted == pytest.approx(0.0, abs=0.01)
