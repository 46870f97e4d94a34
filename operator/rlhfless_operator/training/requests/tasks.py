"""One task of a stage, tried again where another instance may succeed."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from rlhfless_functions.api import Done, RunRequest
from rlhfless_operator.errors import StoreUnavailableError, UserError
from rlhfless_operator.platforms.base import InstanceLostError, Platform, TaskFailedError

RETRY_SECONDS = 0.2
"""Seconds before another attempt."""


class StageFailedError(UserError):
    """A stage cannot be done. The message is for the user."""


async def run_to_end(platform: Platform, make_request: Callable[[int], RunRequest], *, retries: int) -> dict[str, Any]:
    """Run a task until it is done, and return its result.

    Args:
        make_request: the request of the given attempt, from 0.
        retries: how many more attempts there are after instances were lost or failed in a retryable way.

    Raises:
        StageFailedError: the task failed for good.
        StoreUnavailableError: the artifact store did not answer its last attempt.
    """
    attempt = 0
    while True:
        request = make_request(attempt)
        try:
            async with aclosing(platform.run(request)) as events:
                async for event in events:
                    if isinstance(event, Done):
                        return event.result
            raise InstanceLostError("the stream ended without a terminal record")
        except (InstanceLostError, TaskFailedError) as error:
            attempt += 1
            check_retry(error, attempt, retries, f"{request.key.stage} of step {request.key.step}")
            await asyncio.sleep(RETRY_SECONDS)


def check_retry(error: InstanceLostError | TaskFailedError, attempt: int, retries: int, what: str) -> None:
    """Return if another attempt makes sense.

    Raises:
        StageFailedError: it does not.
        StoreUnavailableError: not now, since the artifact store did not answer.
    """
    if isinstance(error, TaskFailedError) and not error.retryable:
        raise StageFailedError(str(error)) from error
    if attempt > retries:
        if isinstance(error, TaskFailedError) and error.reason in ("artifact_missing", "artifact_unwritable"):
            raise StoreUnavailableError(str(error)) from error
        raise StageFailedError(f"{what}: given up after {attempt} attempts; the last said: {error}") from error
