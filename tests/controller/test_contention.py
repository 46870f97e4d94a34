"""The GPUs of a pool that other jobs want, as a driver sees them."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest

from rlhfless_functions.api import Event, RunRequest, Stage, Started
from rlhfless_operator.controller.pools import Pools
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.pools.contention import ALONE, Contention
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.platforms.job_platform import JobPlatform
from tests.controller.operator_harness import a_resource
from tests.jobs import small_job

GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}


def job(**spec: object) -> RLHFJob:
    return RLHFJob.model_validate(small_job(**{"pods": GPU, **spec}))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pools_of(clock: Clock, **pool: object) -> Pools:
    settings = {"default": PoolSettings(gpus=8, **pool), "other": PoolSettings(gpus=8)}  # type: ignore[arg-type]
    return Pools(ClusterSettings(functions_image="f", pools=settings), clock)


@pytest.mark.parametrize("pool", [{}, {"device_class": "gpu.test"}])
def test_jobs_of_a_pool_count_for_as_long_as_their_drivers_work(pool: dict[str, object]) -> None:
    jobs = pools_of(Clock(), **pool)
    with jobs.joined(job(), a_resource()) as one:
        assert jobs.contention(one) == ALONE
        with jobs.joined(job(), a_resource()):
            assert jobs.contention(one) == Contention(0.5, 4)
        assert jobs.contention(one) == ALONE


def test_jobs_of_other_pools_and_without_gpus_do_not_count() -> None:
    jobs = pools_of(Clock())
    with (
        jobs.joined(job(), a_resource()) as one,
        jobs.joined(job(pool="other"), a_resource()),
        jobs.joined(job(pods={}), a_resource()),
    ):
        assert jobs.contention(one) == ALONE
    with jobs.joined(job(pool="unknown"), a_resource()) as one:
        assert jobs.contention(one) == ALONE


def test_within_a_quota_the_jobs_of_the_namespace_count_more() -> None:
    jobs = pools_of(Clock(), namespaces={"small": 2})
    with (
        jobs.joined(job(), a_resource(namespace="large")) as large,
        jobs.joined(job(), a_resource(namespace="small")) as small,
        jobs.joined(job(), a_resource(namespace="small")),
    ):
        assert jobs.contention(large) == Contention(2 / 3, 3)
        assert jobs.contention(small) == Contention(2 / 3, 1)


def test_tasks_that_wait_or_work_are_what_a_job_wants() -> None:
    clock = Clock()
    jobs = pools_of(clock)
    with (
        jobs.joined(job(), a_resource()) as one,
        jobs.joined(job(), a_resource()) as other,
    ):
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
    jobs = pools_of(clock)

    class Working:
        """A platform whose every task takes an hour."""

        async def open(self) -> None:
            pass

        async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
            clock.now += 3600.0
            yield Started(instance="g")

    task = SimpleNamespace(key=SimpleNamespace(stage="generation"))
    with (
        jobs.joined(job(), a_resource()) as one,
        jobs.joined(job(), a_resource()) as other,
    ):
        platform = JobPlatform(Working(), other)  # type: ignore[arg-type]
        for _ in range(2):
            assert [event async for event in platform.run(task)] == [Started(instance="g")]  # type: ignore[arg-type]
        assert jobs.contention(one).wanted == pytest.approx(1 / 8, abs=0.01)
        clock.now += 36_000.0
        assert jobs.contention(one).wanted == pytest.approx(0.0, abs=0.01)
