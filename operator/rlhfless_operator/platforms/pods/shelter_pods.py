"""The pod that keeps a job's episodes while its actors are let go: it is there while a rollout needs it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlhfless_operator.platforms.pods.environment_pods import EnvironmentPods
from rlhfless_operator.platforms.pods.job_objects import Endpoint
from rlhfless_operator.platforms.shelters import SampleKey, ShelterClient, ShelterMissingError

_POLL_SECONDS = 0.5
_START_SECONDS = 120.0
"""Longest wait for its pod, while actors wait as well."""
_MOST_FAILURES = 2
"""Rollouts in a row that waited for it in vain, after which none does any more."""


class ShelterPods:
    """The shelter of one job on a cluster; see `ShelterHost`.

    Args:
        endpoint: the address of its Service.
        client: asks it.
        token: the job's token.
        pods: the book of its pod.
        servers: the book of the pods of the environment's servers, in which its episodes have sessions.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client: ShelterClient,
        token: str,
        pods: EnvironmentPods,
        servers: EnvironmentPods,
        *,
        start_seconds: float = _START_SECONDS,
    ) -> None:
        self.token = token
        self._endpoint = endpoint
        self._client = client
        self._pods = pods
        self._servers = servers
        self._start_seconds = start_seconds
        self._answers: asyncio.Task[None] | None = None
        self._failures = 0

    async def warm(self) -> None:
        """Do nothing: a pod that no rollout needs would only cost. It starts beside the actors of a rollout."""

    @asynccontextmanager
    async def rollout(self, name: str) -> AsyncIterator[None]:
        """Have the pod for a rollout, and keep those of the environment's servers. It starts in the background.

        Raises:
            ShelterMissingError: earlier rollouts have waited for it in vain.
        """
        if self._failures >= _MOST_FAILURES:
            raise self._missing()
        with self._pods.used(), self._servers.used():
            answers = self._answers = asyncio.create_task(self._until_it_answers())
            try:
                yield
            finally:
                if answers.done() and not answers.cancelled() and answers.exception() is None:
                    await self._client.end(self._endpoint.url, name)
                answers.cancel()
                await asyncio.gather(answers, return_exceptions=True)

    async def url(self) -> str:
        """Return its address for actors, once its pod answers.

        Raises:
            ShelterMissingError: the pod does not come.
        """
        assert self._answers is not None, "a rollout comes first"
        await asyncio.shield(self._answers)
        return self._endpoint.address

    async def come(self, rollout: str, samples: list[SampleKey]) -> int:
        """Wait for a while until samples need not wait for their environments; see `ShelterHost.come`."""
        return await self._client.come(self._endpoint.url, rollout, samples)

    async def _until_it_answers(self) -> None:
        deadline = time.monotonic() + self._start_seconds
        while not await self._client.answers(self._endpoint.url):
            if time.monotonic() > deadline:
                self._failures += 1
                raise self._missing()
            await asyncio.sleep(_POLL_SECONDS)
        self._failures = 0

    def _missing(self) -> ShelterMissingError:
        why = f" ({self._pods.problem})" if self._pods.problem else ""
        return ShelterMissingError(
            f"the pod that keeps episodes while actors are let go does not answer within {self._start_seconds:g} s"
            f"{why}; give it what it lacks in environment.pods, or set environment.letGo to never"
        )
