"""The mutating webhook that gives new pods their slots. No pod that takes turns is created without its answer.

Knative has no field for ResourceClaims. So a pod that uses GPUs in turns is created with annotations that name its pool
and its number of slots, and the webhook writes the claims into it. Every replica of the operator serves it. It asks the
API server for the pods each time, and remembers the slots that it just gave, because their pods are not listed yet.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rlhfless_operator.controller.admission import answer_to, question_of
from rlhfless_operator.knative import ApiError, KnativeClient
from rlhfless_operator.platforms.pods.manifests import JOB_LABEL, STAGE_LABEL, TURNS_LABEL
from rlhfless_operator.platforms.pods.pod_watch import PODS
from rlhfless_operator.platforms.turns.slot_claims import (
    CLAIMS,
    Resident,
    choose_slots,
    claim_selector,
    claims_patch,
    gpus_of,
    resident_of,
    slots_of,
)

_MEMORY_SECONDS = 3.0
"""Longest time until a pod with slots is listed, in seconds."""


class SlotAdmission:
    """Answers reviews of new pods that use GPUs in turns.

    Args:
        client: client of the cluster.
    """

    def __init__(self, client: KnativeClient) -> None:
        self._pods = client.resource(PODS)
        self._claims = client.resource(CLAIMS)
        self._given: deque[tuple[float, str, Resident]] = deque()
        self._choosing = asyncio.Lock()

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
        async with self._choosing:
            try:
                claims = (await self._claims.list(namespace, label_selector=claim_selector(name))).items
                pods = (await self._pods.list(namespace, label_selector=f"{TURNS_LABEL}=true")).items
            except ApiError as error:
                raise ValueError(f"the slots of pool {name} can't be read: {error}") from error
            slots = slots_of(claims)
            residents = [*filter(None, map(resident_of, pods)), *self._just_given(namespace)]
            chosen = choose_slots(slots, residents, job, stage, gpus)
            if chosen is None:
                raise ValueError(
                    f"pool {name} has no {gpus} slots for a pod in namespace {namespace}: its ResourceClaims are not"
                    " there yet, or are being deleted"
                )
            if remember:
                self._given.append((time.monotonic(), namespace, Resident(job, stage, chosen)))
        return claims_patch(pod, slots, chosen)

    def _just_given(self, namespace: str) -> list[Resident]:
        oldest = time.monotonic() - _MEMORY_SECONDS
        while self._given and self._given[0][0] < oldest:
            self._given.popleft()
        return [resident for _, where, resident in self._given if where == namespace]
