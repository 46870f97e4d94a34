"""A supervisor's own tasks: it handles their errors itself, and kopf never sees them."""

import asyncio

import pytest

from rlhfless_operator.controller.job import ending_of
from rlhfless_operator.controller.status_writer import ResourceGoneError


async def test_what_a_task_raises_is_its_result() -> None:
    """Else kopf, which looks at every task of the process as it stops, would end the operator with it."""

    async def publish() -> None:
        raise ResourceGoneError("404 Not Found")

    task = asyncio.create_task(ending_of(publish()))
    await asyncio.wait({task})
    assert task.exception() is None
    assert isinstance(task.result(), ResourceGoneError)


async def test_work_that_is_done_has_no_error() -> None:
    assert await ending_of(asyncio.sleep(0)) is None


async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    task = asyncio.create_task(ending_of(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
