"""The ResourceClaims of one pool in all namespaces: never more than the pool has GPUs."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfless_operator.knative import ConflictError, KnativeClient
from rlhfless_operator.planner.pools.division import divide
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from rlhfless_operator.platforms.turns.slot_claims import CLAIMS, GROUP_LABEL, ResourceClaim, claim, claim_selector

_ABANDONED_SECONDS = 60.0
"""Seconds until claims without a known job are deleted: longer than claims are kept after a namespace's last job, and
than a new leader takes to find its jobs."""

_Groups = dict[str, list[ResourceClaim]]
"""The claims of each group of a namespace."""


@dataclass(frozen=True)
class ClaimsReview:
    """A namespace's claims at one moment."""

    there: frozenset[str]
    """All claims."""
    ending: frozenset[str]
    """Claims that are being deleted."""
    condemned: frozenset[str]
    """Claims whose pods must go, because a claim of their group is being deleted: it takes no new pods."""
    elsewhere: str = ""
    """A message about the namespaces that have the pool's claims, if this namespace has none yet."""

    @property
    def problem(self) -> str:
        """The problem of the claims; empty if there is none."""
        names = ", ".join(sorted(self.ending))
        return f"ResourceClaims are being deleted: {names}; their pods follow" if names else self.elsewhere


class PoolDivision:
    """The division of a pool's claims among namespaces.

    If the pool's settings name namespaces, each has a fixed part. Otherwise all share the pool: each gets as many
    groups as its jobs can use, or its fair part if there are too few. A namespace with more than its part returns
    groups if another one lacks some. Tasks on them end first.

    Args:
        client: client of the cluster.
        name: name of the pool.
        settings: settings of the pool, with a DeviceClass.
        namespaces: namespaces in which the operator may list claims; all of them if empty.
    """

    def __init__(
        self, client: KnativeClient, name: str, settings: PoolSettings, namespaces: Sequence[str] = ()
    ) -> None:
        assert settings.device_class is not None, "a pool without a DeviceClass has no slots"
        self._claims = client.resource(CLAIMS)
        self._name = name
        self._device_class = settings.device_class
        self._settings = settings
        self._together = settings.gpus_per_group
        self._namespaces = namespaces
        self._wanted: dict[str, int] = {}
        self._abandoned: dict[str, float] = {}
        """Time since which a namespace has had claims without a job."""
        self._changing = asyncio.Lock()

    def want(self, namespace: str, groups: int) -> None:
        """Set the number of groups that the jobs of a namespace can use."""
        self._wanted[namespace] = groups
        if not groups:
            del self._wanted[namespace]

    def part(self, namespace: str) -> int:
        """Return the number of groups that a namespace should have now."""
        if self._settings.namespaces:
            return min(self._wanted.get(namespace, 0), self._settings.share_of(namespace) // self._together)
        return self._parts().get(namespace, 0)

    async def review(self, namespace: str) -> ClaimsReview:
        """List a namespace's claims, create missing ones, and give back groups that another namespace lacks.

        Claims that an earlier operator left behind are deleted.

        Raises:
            ApiError: the API server refuses, or is not there.
        """
        async with self._changing:
            others = await self._groups(namespace)
            mine = others.pop(namespace, {})
            await self._clear(others)
            found = [each for members in mine.values() for each in members]
            room = self._room(namespace) - sum(map(len, others.values())) - len(mine)
            made = await self._make(namespace, mine, room)
            for group in self._surplus(namespace, mine, others):
                for each in mine[group]:
                    await self._claims.delete(namespace, each.metadata.name)
        ending = [each.metadata for each in found if each.metadata.deletion_timestamp is not None]
        condemned = {each.labels.get(GROUP_LABEL) for each in ending}
        return ClaimsReview(
            frozenset(each.metadata.name for each in found) | made,
            frozenset(each.name for each in ending),
            frozenset(each.metadata.name for each in found if each.metadata.labels.get(GROUP_LABEL) in condemned),
            "" if found or made else self._elsewhere(others),
        )

    async def give_back(self, namespace: str) -> None:
        """Delete all claims of a namespace.

        Raises:
            ApiError: the API server refuses, or is not there.
        """
        async with self._changing:
            for each in (await self._claims.list(namespace, label_selector=claim_selector(self._name))).items:
                await self._claims.delete(namespace, each.metadata.name)

    async def _clear(self, others: Mapping[str, _Groups]) -> None:
        now = time.monotonic()
        self._abandoned = {name: self._abandoned.get(name, now) for name in others if name not in self._wanted}
        for name, since in self._abandoned.items():
            if now >= since + _ABANDONED_SECONDS:
                for each in [each for claims in others[name].values() for each in claims]:
                    await self._claims.delete(name, each.metadata.name)

    def _parts(self) -> dict[str, int]:
        return divide(self._wanted, self._settings.gpus // self._together)

    def _room(self, namespace: str) -> int:
        return self._settings.share_of(namespace) // self._together

    async def _groups(self, namespace: str) -> dict[str, _Groups]:
        """Return the claims of each group by namespace; only of this namespace if the others don't matter."""
        selector = claim_selector(self._name)
        places: Sequence[str | None] = [namespace] if self._settings.namespaces else self._namespaces or [None]
        found: dict[str, _Groups] = {}
        for place in places:
            for each in (await self._claims.list(place, label_selector=selector)).items:
                groups = found.setdefault(each.metadata.namespace, {})
                groups.setdefault(each.metadata.labels.get(GROUP_LABEL, ""), []).append(each)
        return found

    async def _make(self, namespace: str, mine: _Groups, room: int) -> frozenset[str]:
        """Create the missing claims of this namespace's part, as far as groups have room. Returns their names."""
        made = set()
        for group in range(self.part(namespace)):
            there = mine.get(str(group))
            if there is None and room <= 0:
                continue
            room -= there is None
            names = {each.metadata.name for each in there or ()}
            for index in range(self._together):
                manifest = claim(namespace, self._name, self._device_class, group, index)
                if manifest["metadata"]["name"] not in names:
                    with contextlib.suppress(ConflictError):
                        await self._claims.create(manifest)
                    made.add(manifest["metadata"]["name"])
        return frozenset(made)

    def _surplus(self, namespace: str, mine: _Groups, others: Mapping[str, _Groups]) -> list[str]:
        """Return the groups of this namespace that others lack, the last ones first.

        Groups that are already being deleted go to these others.
        """
        if self._settings.namespaces:
            return []
        parts = self._parts()
        lacking = sum(max(0, part - len(others.get(name, {}))) for name, part in parts.items() if name != namespace)
        free = self._room(namespace) - sum(map(len, others.values())) - len(mine)
        coming = sum(_ending(claims) for groups in (mine, *others.values()) for claims in groups.values())
        staying = [group for group, claims in mine.items() if not _ending(claims)]
        count = min(lacking - free - coming, len(staying) - parts.get(namespace, 0))
        return sorted(staying, key=lambda group: int(group or 0), reverse=True)[: max(0, count)]

    def _elsewhere(self, others: Mapping[str, _Groups]) -> str:
        if not others:
            return ""
        who = ", ".join(f"{name} {len(groups) * self._together}" for name, groups in sorted(others.items()))
        return (
            f"pool {self._name} has {self._settings.gpus} GPUs, and other namespaces have them: {who}; they give back"
            " what is more than their part when their tasks have ended, and the rest half a minute after their last job"
        )


def _ending(claims: Sequence[ResourceClaim]) -> bool:
    return any(each.metadata.deletion_timestamp is not None for each in claims)
