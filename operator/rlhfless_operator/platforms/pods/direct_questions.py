"""Questions to pods at their own addresses, past Knative, as long as they can be reached there."""

import time
from typing import Any

import aiohttp

from rlhfless_operator.platforms.pods.manifests import PORT

_DIRECT_SECONDS = 2.0
"""Time limit for a pod to answer a direct request, in seconds."""
_INDIRECT_SECONDS = 60.0
"""Seconds without direct requests to pods after one did not answer: a network policy may drop them."""


class DirectQuestions:
    """Asks pods whether they are at work.

    Args:
        session: an open session; the caller closes it.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._indirect_until = 0.0

    @property
    def reach(self) -> bool:
        """Whether pods can be asked, as far as is known."""
        return time.monotonic() >= self._indirect_until

    async def is_busy(self, ip: str) -> bool:
        """Return whether a pod reports that it is at work; False also if it does not answer."""
        begun = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=_DIRECT_SECONDS)
        try:
            async with self._session.get(
                f"http://{ip}:{PORT}/readyz", timeout=timeout, allow_redirects=False
            ) as response:
                answer: Any = await response.json(content_type=None)
        except TimeoutError:
            self._indirect_until = begun + _INDIRECT_SECONDS
            return False
        except (aiohttp.ClientError, OSError, ValueError):
            return False
        return isinstance(answer, dict) and bool(answer.get("busy"))
