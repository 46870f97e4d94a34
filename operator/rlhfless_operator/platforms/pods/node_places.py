"""The location of a cluster's nodes, from their labels."""

import asyncio
import logging
import time
from collections.abc import Sequence

from rlhfless_operator.knative import ApiError, Kind, KnativeClient, KubernetesObject
from rlhfless_operator.planner.pools.placement import HOSTNAME

logger = logging.getLogger(__name__)

NODES = Kind("", "v1", "nodes", KubernetesObject)
_PATIENCE_SECONDS = 2.0
"""Time limit for listing the nodes while a task waits, in seconds; after it, the location stays unknown."""
_PAUSE_SECONDS = 60.0
"""Shortest time between two lists, in seconds."""


class NodePlaces:
    """The nodes' locations. A query for an unknown node lists the nodes.

    Args:
        client: client of the cluster.
        topology_keys: labels that name a node's domains, the nearest first.
        allowed: whether the operator may list nodes. Otherwise a location is only the node's name.
    """

    def __init__(self, client: KnativeClient, topology_keys: Sequence[str], *, allowed: bool) -> None:
        self._nodes = client.resource(NODES)
        self._keys = [key for key in topology_keys if key != HOSTNAME]
        self._allowed = allowed and bool(self._keys)
        self._known: dict[str, list[str]] = {}
        self._looked_at = -_PAUSE_SECONDS
        self._looking = asyncio.Lock()

    async def of(self, node: str) -> list[str]:
        """Return the name of a node and its domains, the nearest first; empty for a node without a name."""
        if not node:
            return []
        if self._allowed and node not in self._known:
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS), self._looking:
                    await self._look(node)
            except (ApiError, TimeoutError) as error:
                logger.warning("nodes can't be listed, and their zones are unknown: %s", error)
        return [node, *self._known.get(node, [])]

    async def _look(self, node: str) -> None:
        if node in self._known or time.monotonic() < self._looked_at + _PAUSE_SECONDS:
            return
        self._looked_at = time.monotonic()
        for found in (await self._nodes.list()).items:
            self._known[found.metadata.name] = [found.metadata.labels.get(key, "") for key in self._keys]
