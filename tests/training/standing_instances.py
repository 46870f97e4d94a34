"""Instances of each stage that stand still at their first task of each step, in another manner at each step."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

from rlhfless_functions.api import STAGES, RunRequest
from rlhfless_functions.serving import server
from rlhfless_functions.serving.function import Instance
from tests.training.altered_functions import altered_functions

_MARKS = "RLHFLESS_STANDING"
MANNERS = ("never answers", "falls silent", "stands and sends heartbeats")
"""In the order of the steps: the request is read, and no answer comes; after the first event no other comes, since the
event loop stands; the worker's thread stands, and the event loop goes on."""


@contextmanager
def standing_instances(marks: Path) -> Iterator[list[str]]:
    """Have instances stand still; yields what stands, by stage and manner, once it is over.

    Args:
        marks: an empty folder.
    """
    stood: list[str] = []
    with altered_functions(f"{__name__}:stand", **{_MARKS: str(marks)}):
        yield stood
    stood += sorted(file.name for file in marks.iterdir())


def all_standing() -> list[str]:
    """Return each stage and manner."""
    return sorted(f"{stage} {manner}" for stage in STAGES for manner in MANNERS)


def stand() -> None:
    """Have the instances of this fork server stand still."""
    read_request, stream, work = server._read_request, Instance.stream, Instance._work

    async def never_answers(*arguments: Any) -> Any:
        request = await read_request(*arguments)
        if _stands(request, "never answers"):
            await asyncio.Event().wait()
        return request

    async def falls_silent(instance: Instance, request: RunRequest, *arguments: Any) -> AsyncIterator[bytes]:
        silent = _stands(request, "falls silent")
        async with aclosing(stream(instance, request, *arguments)) as events:
            async for event in events:
                yield event
                if silent:
                    # What was sent is to arrive.
                    await asyncio.sleep(0.1)
                    time.sleep(3600)  # noqa: ASYNC251 - the whole loop stands

    def stands(instance: Instance, request: Any, context: Any) -> None:
        if _stands(request, "stands and sends heartbeats"):
            threading.Event().wait()
        work(instance, request, context)

    server._read_request, Instance.stream, Instance._work = never_answers, falls_silent, stands  # type: ignore


def _stands(request: Any, manner: str) -> bool:
    """Return whether this is the first task of a step for which this manner is due; mark that it stands."""
    key = getattr(request, "key", None)
    if key is None or manner != dict(enumerate(MANNERS, start=1)).get(key.step):
        return False
    try:
        Path(os.environ[_MARKS], f"{key.stage} {manner}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
