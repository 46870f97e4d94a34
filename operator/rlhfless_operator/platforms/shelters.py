"""The process that keeps episodes while actors are let go: its interface, and the driver's questions to it.

The process is `rlhfless_functions.environments.shelter`.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import aiohttp

from rlhfless_operator.errors import UserError

_QUESTION_SECONDS = 30.0
"""Time limit of a question. A shelter waits no longer than a few seconds for samples."""
SampleKey = tuple[int, int]


class ShelterMissingError(UserError):
    """The process can't be had; the message has the remedy."""


class ShelterHost(Protocol):
    """Has the episodes of rollouts outside of their actors."""

    @property
    def token(self) -> str:
        """The bearer token of its address."""

    async def warm(self) -> None:
        """Prepare for the next rollout, where it costs nothing to wait for it.

        Raises:
            ShelterMissingError: it can't be had.
        """

    def rollout(self, name: str) -> AbstractAsyncContextManager[None]:
        """Have what a rollout's episodes need as long as the context lasts, and then end them.

        Raises:
            ShelterMissingError: on entering: it can't be had.
        """

    async def url(self) -> str:
        """Return its address for actors, once it answers.

        Raises:
            ShelterMissingError: it can't be had.
        """

    async def come(self, rollout: str, samples: list[SampleKey]) -> int:
        """Wait for a while until samples need not wait any longer; return their number. If the episodes are lost, none
        needs to."""


class ShelterClient:
    """Asks a shelter on behalf of a driver.

    Args:
        session: an open session; the caller closes it.
        token: the bearer token.
        host: the `Host` header, if it differs from the host of its address.
    """

    def __init__(self, session: aiohttp.ClientSession, token: str, host: str | None = None) -> None:
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}", **({} if host is None else {"Host": host})}

    async def answers(self, url: str) -> bool:
        """Return whether it answers at an address."""
        timeout = aiohttp.ClientTimeout(total=_QUESTION_SECONDS)
        try:
            async with self._session.get(f"{url}/healthz", headers=self._headers, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def come(self, url: str, rollout: str, samples: Sequence[SampleKey]) -> int:
        """Wait until samples of a rollout need not wait for their environments; see `ShelterHost.come`."""
        try:
            answer = await self._ask(url, "come", {"rollout": rollout, "samples": list(samples)})
        except (aiohttp.ClientError, OSError):
            return len(samples)
        return len(answer["samples"])

    async def end(self, url: str, rollout: str) -> None:
        """End the episodes of a rollout, if it answers."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._ask(url, "end", {"rollout": rollout})

    async def _ask(self, url: str, what: str, body: dict[str, Any]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=_QUESTION_SECONDS)
        async with self._session.post(
            f"{url}/v1/{what}", json=body, headers=self._headers, timeout=timeout
        ) as response:
            response.raise_for_status()
            return dict(await response.json())
