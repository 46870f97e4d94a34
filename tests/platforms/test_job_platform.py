"""What happens around a job's platform, and in which order."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from rlhfless_functions.api import Done, Event, Preload, RunRequest, Stage, Started
from rlhfless_operator.platforms.base import InstanceLostError, PlatformUnavailableError
from rlhfless_operator.platforms.job_platform import ClusterPlatform, Hook, JobPlatform, JobShelter, Listener
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.platforms.shelters import ShelterHost, ShelterMissingError
from tests.jobs import export_request


class Noting:
    """A platform that notes its calls; its task waits between its two events."""

    shelter: ShelterHost | None = None

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.unavailable = False
        self.lost = False
        self.go_on = asyncio.Event()

    async def open(self) -> None:
        self.calls.append("open")
        if self.unavailable:
            raise PlatformUnavailableError("no Services")

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        self.calls.append(f"hold {count}")

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        try:
            yield Started(instance="i")
            if self.lost:
                raise InstanceLostError("killed")
            await self.go_on.wait()
            yield Done(result={})
        finally:
            await asyncio.sleep(0)
            self.calls.append("ran")

    async def close(self) -> None:
        self.calls.append("close")

    async def remove(self) -> None:
        self.calls.append("remove")


class Around(Hook):
    """A hook that notes when its contexts begin and end, and what it is told."""

    def __init__(self, name: str, calls: list[str], takes: int = -1) -> None:
        self._name = name
        self._calls = calls
        self._takes = takes

    @asynccontextmanager
    async def _around(self, what: str) -> AsyncIterator[Listener]:
        self._calls.append(f"{self._name} {what}")
        try:
            yield lambda event: self._calls.append(f"{self._name} {event.event}")
        except BaseException as error:
            self._calls.append(f"{self._name} {type(error).__name__}")
            raise
        else:
            self._calls.append(f"{self._name} after {what}")

    @asynccontextmanager
    async def opening(self, platform: ClusterPlatform) -> AsyncIterator[None]:
        async with self._around("opening"):
            yield

    async def hold(self, stage: Stage, count: int, preload: Preload | None) -> bool:
        return count == self._takes

    @asynccontextmanager
    async def task(self, request: RunRequest) -> AsyncIterator[Listener]:
        async with self._around("task") as listen:
            yield listen

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        async with self._around("closing"):
            yield


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def inner(calls: list[str]) -> Noting:
    return Noting(calls)


@pytest.fixture
def job(inner: Noting, calls: list[str]) -> JobPlatform:
    member = PoolMember("uid", "team", "job", {"generation": 1})
    made = JobPlatform(inner, member, Hook(), Around("inner", calls, takes=2))
    made.surround(Around("outer", calls))
    return made


OPENED = ["outer opening", "inner opening", "open", "inner after opening", "outer after opening"]
BEGUN = ["outer task", "inner task", "outer started", "inner started"]


async def test_it_opens_once_when_it_is_needed_and_closes_within_its_hooks(job: JobPlatform, calls: list[str]) -> None:
    assert calls == []
    await asyncio.gather(job.hold("generation", 1), job.hold("generation", 3))
    await job.hold("generation", 2)
    assert calls == [*OPENED, "hold 1", "hold 3"], "a hook has taken the last"
    calls.clear()
    await job.close()
    await job.remove()
    assert calls == [
        *("outer closing", "inner closing", "close", "inner after closing", "outer after closing", "remove"),
    ]


async def test_what_does_not_open_is_opened_anew(job: JobPlatform, inner: Noting, calls: list[str]) -> None:
    inner.unavailable = True
    with pytest.raises(PlatformUnavailableError):
        await job.hold("generation", 1)
    name = "PlatformUnavailableError"
    assert calls == ["outer opening", "inner opening", "open", f"inner {name}", f"outer {name}"]
    calls.clear()
    inner.unavailable = False
    await job.open()
    assert calls == OPENED


async def test_hooks_see_every_event_of_a_task(job: JobPlatform, inner: Noting, calls: list[str]) -> None:
    inner.go_on.set()
    events = [event.event async for event in job.run(export_request("x", stage="generation"))]
    assert events == ["started", "done"]
    ended = ["outer done", "inner done", "ran", "inner after task", "outer after task"]
    assert calls == [*OPENED, *BEGUN, *ended]


async def test_a_task_that_is_cut_ends_before_its_hooks_do(job: JobPlatform, calls: list[str]) -> None:
    async with aclosing(job.run(export_request("x", stage="generation"))) as events:
        await anext(events)
    assert calls == [*OPENED, *BEGUN, "ran", "inner GeneratorExit", "outer GeneratorExit"]


async def test_a_task_that_is_cancelled_ends_before_its_hooks_do(job: JobPlatform, calls: list[str]) -> None:
    async def run() -> None:
        async with aclosing(job.run(export_request("x", stage="generation"))) as events:
            async for _ in events:
                pass

    running = asyncio.create_task(run())
    while calls[-1:] != ["inner started"]:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert calls == [*OPENED, *BEGUN, "ran", "inner CancelledError", "outer CancelledError"]


async def test_an_error_passes_through_the_hooks(job: JobPlatform, inner: Noting, calls: list[str]) -> None:
    inner.lost = True
    with pytest.raises(InstanceLostError, match="killed"):
        _ = [event async for event in job.run(export_request("x", stage="generation"))]
    assert calls == [*OPENED, *BEGUN, "ran", "inner InstanceLostError", "outer InstanceLostError"]


class Keeping:
    """Keeps episodes, and notes its calls."""

    token = "t"

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def warm(self) -> None:
        self.calls.append("warm")

    @asynccontextmanager
    async def rollout(self, name: str) -> AsyncIterator[None]:
        self.calls.append(f"begin {name}")
        yield
        self.calls.append(f"end {name}")

    async def url(self) -> str:
        return "http://keeper"

    async def come(self, rollout: str, samples: list[tuple[int, int]]) -> int:
        return len(samples)


async def test_the_first_rollout_that_needs_a_shelter_opens_the_platform() -> None:
    calls: list[str] = []
    platform = Noting(calls)
    platform.shelter = Keeping(calls)
    shelter = JobShelter()
    shelter.platform = JobPlatform(platform, PoolMember("uid", "team", "job", {}))
    async with shelter.rollout("training-1"):
        assert (await shelter.url(), shelter.token, await shelter.come("training-1", [(0, 0)])) == (
            "http://keeper",
            "t",
            1,
        )
    await shelter.warm()
    assert calls == ["open", "begin training-1", "end training-1", "warm"]


async def test_without_a_shelter_or_a_platform_a_rollout_keeps_its_actors() -> None:
    platform = Noting([])
    shelter = JobShelter()
    shelter.platform = JobPlatform(platform, PoolMember("uid", "team", "job", {}))
    platform.unavailable = True
    with pytest.raises(ShelterMissingError, match="no Services"):
        async with shelter.rollout("training-1"):
            pytest.fail("the platform is not open")
    platform.unavailable = False
    with pytest.raises(ShelterMissingError, match="no pod that keeps episodes"):
        async with shelter.rollout("training-1"):
            pytest.fail("nothing keeps its episodes")
