"""A watch without end, which handles bookmarks, expired versions, broken connections and restarts of the API server."""

import asyncio
import json
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from rlhfless_operator.knative.errors import ApiError, ForbiddenError, NotFoundError, error_of_status
from rlhfless_operator.knative.models import KubernetesObject

logger = logging.getLogger(__name__)

_SERVER_SECONDS = 240
"""Seconds after which the API server ends a watch. This limits the cost of a dead connection that goes unnoticed."""
_GRACE_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0

Object = TypeVar("Object", bound=KubernetesObject)


@dataclass(frozen=True)
class Listing(Generic[Object]):
    """All objects at one moment."""

    items: list[Object]
    resource_version: str
    """Resource version of that moment, from which a watch continues."""


@dataclass(frozen=True)
class WatchEvent(Generic[Object]):
    """A change."""

    type: Literal["added", "modified", "deleted", "synced"]
    """`synced`: all objects of the last list have been reported."""
    object: Object | None
    """The object now, or as last seen; None with `synced`."""


async def follow(
    list_all: Callable[[], Awaitable[Listing[Object]]],
    open_lines: Callable[[Mapping[str, str], float], AsyncGenerator[bytes, None]],
    read: Callable[[Mapping[str, Any]], Object],
) -> AsyncGenerator[WatchEvent[Object], None]:
    """Yield all objects and then every change, without end; see `ResourceClient.watch`.

    Args:
        list_all: lists the objects.
        open_lines: opens a watch with query parameters and a time limit in seconds; yields its lines.
        read: parses an object from its JSON.

    Raises:
        ForbiddenError, NotFoundError: the first list is refused. Later ones are retried after any error.
    """
    known: dict[str, Object] = {}
    synced = False
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            listing = await list_all()
            for event in _differences(known, listing.items):
                yield event
            synced = True
            yield WatchEvent("synced", None)
            version = listing.resource_version
            pause = _FIRST_PAUSE_SECONDS
            while True:
                async with aclosing(open_lines(_watching_from(version), _SERVER_SECONDS + _GRACE_SECONDS)) as lines:
                    async for line in lines:
                        change = json.loads(line)
                        content = change["object"]
                        if change["type"] == "ERROR":
                            raise error_of_status(content)
                        version = content["metadata"]["resourceVersion"]
                        if change["type"] != "BOOKMARK":
                            yield _take(known, change["type"], read(content))
                await asyncio.sleep(_FIRST_PAUSE_SECONDS)
        except (ForbiddenError, NotFoundError):
            if not synced:
                raise
            logger.warning("a watch is refused now; retrying", exc_info=True)
        except (ApiError, ValueError, KeyError) as error:
            logger.info("a watch was interrupted and restarts: %s", error)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _watching_from(version: str) -> dict[str, str]:
    return {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": str(_SERVER_SECONDS),
    }


def _take(known: dict[str, Object], change: str, item: Object) -> WatchEvent[Object]:
    uid = item.metadata.uid
    if change == "DELETED":
        known.pop(uid, None)
        return WatchEvent("deleted", item)
    seen = uid in known
    known[uid] = item
    return WatchEvent("modified" if seen else "added", item)


def _differences(known: dict[str, Object], items: list[Object]) -> list[WatchEvent[Object]]:
    """Return the changes since `known`, which is updated."""
    events: list[WatchEvent[Object]] = []
    present = {item.metadata.uid for item in items}
    gone = [uid for uid in known if uid not in present]
    events += [WatchEvent("deleted", known.pop(uid)) for uid in gone]
    for item in items:
        before = known.get(item.metadata.uid)
        known[item.metadata.uid] = item
        if before is None:
            events.append(WatchEvent("added", item))
        elif before.metadata.resource_version != item.metadata.resource_version:
            events.append(WatchEvent("modified", item))
    return events
