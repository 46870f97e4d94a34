"""The mutating webhook that gives new pods their slots. No pod that takes turns is created without its answer.

Knative has no field for ResourceClaims. So a pod that uses GPUs in turns is created with annotations that name its pool
and its number of slots, and the webhook writes the claims into it. Every replica of the operator serves it. It asks the
API server for the pods each time, and remembers the slots that it just gave, because their pods are not listed yet.
Pods that are made together share a look.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless_operator.controller.admission import answer_to, question_of
from rlhfless_operator.knative import ApiError, KnativeClient
from rlhfless_operator.platforms.pods.manifests import JOB_LABEL, STAGE_LABEL, TURNS_LABEL
from rlhfless_operator.platforms.pods.pod_watch import PODS
from rlhfless_operator.platforms.turns.slot_claims import (
    CLAIMS,
    Resident,
    Slot,
    choose_slots,
    claim_selector,
    claims_patch,
    gpus_of,
    resident_of,
    slots_of,
)

_MEMORY_SECONDS = 3.0
"""Longest time until a pod with slots is listed, in seconds."""


_LONGEST_LOOK = 10.0
"""Seconds after which nobody waits for a look any more."""


@dataclass(frozen=True)
class _Look:
    """A pool's slots in a namespace, and the pods that have any there."""

    began: float
    slots: Sequence[Slot]
    residents: Sequence[Resident]


class SlotAdmission:
    """Answers reviews of new pods that use GPUs in turns.

    Args:
        client: client of the cluster.
    """

    def __init__(self, client: KnativeClient) -> None:
        self._pods = client.resource(PODS)
        self._claims = client.resource(CLAIMS)
        self._given: deque[tuple[float, str, Resident]] = deque()
        self._looking = asyncio.Lock()
        self._next: dict[tuple[str, str], asyncio.Task[_Look]] = {}
        """Looks that have not begun, by namespace and pool."""

    async def review(self, body: Any) -> dict[str, Any]:
        """Answer an AdmissionReview of a new pod. It refuses a pod that can't have its slots.

        Raises:
            ValueError: `body` is not such a review.
        """
        request = question_of(body)
        pod = request.get("object")
        if not isinstance(pod, Mapping) or request.get("operation") != "CREATE":
            return answer_to(request, [])
        try:
            patch = await self._patch(pod, str(request.get("namespace", "")), remember=not request.get("dryRun"))
        except ValueError as error:
            return answer_to(request, [], refusal=str(error))
        return answer_to(request, patch)

    async def _patch(self, pod: Mapping[str, Any], namespace: str, *, remember: bool) -> list[dict[str, Any]]:
        """Return the JSON patch that gives a new pod its slots; empty for a pod that takes no turns.

        Raises:
            ValueError: the pod can't have slots; the message says why.
        """
        wanted = gpus_of(pod)
        if wanted is None:
            return []
        name, gpus = wanted
        labels = pod["metadata"].get("labels") or {}
        job, stage = labels.get(JOB_LABEL, ""), labels.get(STAGE_LABEL, "")
        try:
            look = await self._look(namespace, name)
        except ApiError as error:
            raise ValueError(f"the slots of pool {name} can't be read: {error}") from error
        chosen = choose_slots(look.slots, [*look.residents, *self._just_given(namespace, look.began)], job, stage, gpus)
        if chosen is None:
            raise ValueError(
                f"pool {name} has no {gpus} slots for a pod in namespace {namespace}: its ResourceClaims are not"
                " there yet, or are being deleted"
            )
        if remember:
            self._given.append((time.monotonic(), namespace, Resident(job, stage, chosen)))
        return claims_patch(pod, look.slots, chosen)

    async def _look(self, namespace: str, pool: str) -> _Look:
        """Return a look that begins after this call. All that wait for it share it."""
        there = namespace, pool
        if (look := self._next.get(there)) is None:
            look = self._next[there] = asyncio.create_task(self._begin_look(there))
        return await asyncio.shield(look)

    async def _begin_look(self, there: tuple[str, str]) -> _Look:
        async with self._looking:
            del self._next[there]
            (namespace, pool), began = there, time.monotonic()
            claims = (await self._claims.list(namespace, label_selector=claim_selector(pool))).items
            pods = (await self._pods.list(namespace, label_selector=f"{TURNS_LABEL}=true")).items
        return _Look(began, slots_of(claims), [*filter(None, map(resident_of, pods))])

    def _just_given(self, namespace: str, began: float) -> list[Resident]:
        """Return the pods that a look, which began at this time, may have missed."""
        oldest = time.monotonic() - _MEMORY_SECONDS - _LONGEST_LOOK
        while self._given and self._given[0][0] < oldest:
            self._given.popleft()
        since = began - _MEMORY_SECONDS
        return [resident for at, where, resident in self._given if where == namespace and at >= since]
