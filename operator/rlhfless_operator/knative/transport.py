"""Requests to an API server: authentication, errors, and patience while it restarts."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient

from rlhfless_operator.knative.errors import UnavailableError, error_of

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_REQUEST_SECONDS = 30.0


class Transport:
    """One API server.

    Args:
        api: the official client; the caller closes it.
        patience: seconds to retry a request while the API server can't be reached or can't answer. Requests that must
            not be sent twice are not retried.
        on_request: called with the verb of every attempt (`get`, `list`, `watch`, `apply`, `create`, `patch`,
            `delete`).
    """

    def __init__(
        self, api: ApiClient, *, patience: float = 30.0, on_request: Callable[[str], None] = lambda verb: None
    ) -> None:
        self._api = api
        self._patience = patience
        self._on_request = on_request

    async def send(
        self,
        verb: str,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        repeat: bool = True,
    ) -> dict[str, Any]:
        """Make a request and return the answer.

        Raises:
            ApiError: the answer is an error; `UnavailableError` once `patience` is over.
        """
        deadline = asyncio.get_running_loop().time() + self._patience
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                with _reaching():
                    response = await self._open(verb, method, path, query or {}, body, content_type, _REQUEST_SECONDS)
                    answer: dict[str, Any] = json.loads(await response.read())
                    return answer
            except UnavailableError:
                left = deadline - asyncio.get_running_loop().time()
                if not repeat or left <= 0:
                    raise
                await asyncio.sleep(min(left, pause * random.uniform(0.5, 1.0)))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def get(self, path: str) -> dict[str, Any]:
        """Return the object or the list at a path; see `send`."""
        return await self.send("get", "GET", path)

    async def lines(self, path: str, query: Mapping[str, str], timeout_seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer that does not end by itself.

        Raises:
            ApiError: the answer is an error; `UnavailableError` if the connection broke.
        """
        with _reaching():
            response = await self._open("watch", "GET", path, query, None, "application/json", timeout_seconds)
            try:
                async for line in response.content:
                    yield line
            finally:
                response.close()

    async def _open(
        self,
        verb: str,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None,
        content_type: str,
        timeout_seconds: float,
    ) -> aiohttp.ClientResponse:
        self._on_request(verb)
        method, url, headers, sent, _ = await self._api.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=10)
        answer = await self._api.call_api(method, url, headers, sent, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answer.response
        if response.status >= 400:
            raise error_of(response.status, await response.read())
        return response


@contextmanager
def _reaching() -> Iterator[None]:
    """Turn the errors of a connection into UnavailableError."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        text = str(error) or type(error).__name__
        raise UnavailableError(0, "Unreachable", f"the API server can't be reached: {text}") from error
