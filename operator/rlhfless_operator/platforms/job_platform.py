"""The platform of one job on a cluster, with hooks around its driver's calls."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, nullcontext
from typing import Protocol

from rlhfless_functions.api import Event, Preload, RunRequest, Stage
from rlhfless_operator.platforms.base import Platform, PlatformUnavailableError
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.platforms.shelters import SampleKey, ShelterHost, ShelterMissingError

Listener = Callable[[Event], None]
"""Called with each event of a task."""


class ClusterPlatform(Platform, Protocol):
    """A platform that creates something on a cluster for a job."""

    @property
    def shelter(self) -> ShelterHost | None:
        """Keeps episodes while actors are let go, once the platform is open; None if the job has none."""

    async def open(self) -> None:
        """Create what the functions need. Called once, before anything else.

        Raises:
            PlatformUnavailableError: the cluster can't provide it now.
        """

    async def remove(self) -> None:
        """Remove what `open` created. Called after `close`, once the job has ended or is suspended.

        Raises:
            PlatformUnavailableError: the cluster does not answer now.
        """


class Hook:
    """Something that happens around a driver's calls of a platform. A subclass overrides the methods that it needs."""

    def opening(self, platform: ClusterPlatform) -> AbstractAsyncContextManager[None]:
        """Surround the opening of the platform."""
        return nullcontext()

    async def hold(self, stage: Stage, count: int, preload: Preload | None) -> bool:
        """Return True to take the call in the platform's place."""
        return False

    def task(self, request: RunRequest) -> AbstractAsyncContextManager[Listener | None]:
        """Surround a task, from before it is sent until its stream has ended."""
        return nullcontext()

    def closing(self) -> AbstractAsyncContextManager[None]:
        """Surround the closing of the platform."""
        return nullcontext()


class JobPlatform:
    """A platform that opens when it is first needed, and counts the job's tasks in its pool.

    Args:
        platform: the platform.
        member: the job in its pool.
        hooks: hooks, the outermost first.
    """

    def __init__(self, platform: ClusterPlatform, member: PoolMember, *hooks: Hook) -> None:
        self._platform = platform
        self._member = member
        self._hooks = list(hooks)
        self._opening = asyncio.Lock()
        self._is_open = False

    def surround(self, *hooks: Hook) -> None:
        """Add hooks outside of those that it has, before it is open."""
        self._hooks[:0] = hooks

    async def open(self) -> None:
        """Open the platform, unless it is open."""
        async with self._opening:
            if not self._is_open:
                async with AsyncExitStack() as around:
                    for hook in self._hooks:
                        await around.enter_async_context(hook.opening(self._platform))
                    await self._platform.open()
                self._is_open = True

    @property
    def shelter(self) -> ShelterHost | None:
        """Keeps episodes while actors are let go; see `ClusterPlatform.shelter`."""
        return self._platform.shelter

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """Set the wanted number of instances of a stage; see `Platform.hold`."""
        await self.open()
        for hook in self._hooks:
            if await hook.hold(stage, count, preload):
                return
        await self._platform.hold(stage, count, preload)

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """Send a task to an instance; see `Platform.run`."""
        with self._member.wanting(request.key.stage):
            await self.open()
            async with AsyncExitStack() as around:
                entered = [await around.enter_async_context(hook.task(request)) for hook in self._hooks]
                listeners = [listener for listener in entered if listener is not None]
                events = await around.enter_async_context(aclosing(self._platform.run(request)))
                async for event in events:
                    for listener in listeners:
                        listener(event)
                    yield event

    async def close(self) -> None:
        """End every instance, and clean up."""
        async with AsyncExitStack() as around:
            for hook in self._hooks:
                await around.enter_async_context(hook.closing())
            await self._platform.close()

    async def remove(self) -> None:
        """Remove what the platform created; see `ClusterPlatform.remove`."""
        await self._platform.remove()


class JobShelter:
    """The shelter of a job on a cluster, whose platform opens when a rollout needs it; see `ShelterHost`."""

    def __init__(self) -> None:
        self.platform: JobPlatform | None = None
        """Platform of the job, set before the first rollout."""

    @property
    def token(self) -> str:
        """The bearer token of its address, once a rollout is open."""
        assert self.platform is not None and self.platform.shelter is not None, "a rollout comes first"
        return self.platform.shelter.token

    async def warm(self) -> None:
        """Prepare for the next rollout; see `ShelterHost.warm`."""
        await (await self._opened()).warm()

    @asynccontextmanager
    async def rollout(self, name: str) -> AsyncIterator[None]:
        """Have what a rollout's episodes need; see `ShelterHost.rollout`.

        Raises:
            ShelterMissingError: it can't be had.
        """
        async with (await self._opened()).rollout(name):
            yield

    async def url(self) -> str:
        """Return its address for actors; see `ShelterHost.url`."""
        return await (await self._opened()).url()

    async def come(self, rollout: str, samples: list[SampleKey]) -> int:
        """Wait for samples; see `ShelterHost.come`."""
        return await (await self._opened()).come(rollout, samples)

    async def _opened(self) -> ShelterHost:
        assert self.platform is not None, "the driver's platform comes first"
        try:
            await self.platform.open()
        except PlatformUnavailableError as error:
            raise ShelterMissingError(str(error)) from error
        if self.platform.shelter is None:
            raise ShelterMissingError("this job has no pod that keeps episodes")
        return self.platform.shelter
