"""Slots of a cluster as ResourceClaims: pure functions that create claims, and choose the claims of a pod.

A claim is one GPU of a pool's DeviceClass (Dynamic Resource Allocation, `resource.k8s.io/v1`, Kubernetes 1.34). Pods
that name one claim run side by side on its GPU; the operator keeps only one of them awake at a time. Claims whose GPUs
an instance needs at once are a *group*. Every pod of a group names all of its claims, which Kubernetes then allocates
on one node, and its container uses as many as it needs.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless_operator.knative import Kind, KubernetesModel, KubernetesObject
from rlhfless_operator.platforms.pods.manifests import (
    CONTAINER,
    GPUS,
    JOB_LABEL,
    MANAGED_BY,
    MANAGER,
    POOL,
    SLOTS,
    STAGE_LABEL,
    Manifest,
)

GROUP_LABEL = "rlhfless.io/slot-group"
_POOL_LABEL = POOL
_REQUEST = "gpu"


class ClaimStatus(KubernetesModel):
    """The status of a claim."""

    allocation: dict[str, Any] | None = None


class ResourceClaim(KubernetesObject):
    """The parts of a ResourceClaim that the operator reads."""

    status: ClaimStatus = ClaimStatus()


CLAIMS = Kind("resource.k8s.io", "v1", "resourceclaims", ResourceClaim)


@dataclass(frozen=True)
class Slot:
    """A claim that pods can name."""

    name: str
    group: str


@dataclass(frozen=True)
class Resident:
    """A pod that uses slots in turns, or is about to be created."""

    job: str
    stage: str
    slots: tuple[str, ...]


def claim(namespace: str, pool: str, device_class: str, group: int, index: int) -> Manifest:
    """Return the claim of one GPU."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": f"rlhfless-{pool}-{group}-{index}",
            "namespace": namespace,
            "labels": {MANAGED_BY: MANAGER, _POOL_LABEL: pool, GROUP_LABEL: str(group)},
        },
        "spec": {"devices": {"requests": [{"name": _REQUEST, "exactly": {"deviceClassName": device_class}}]}},
    }


def why_overlooked(named: Iterable[str], there: Collection[str], ending: Collection[str]) -> str:
    """Return the reason why the scheduler ignores a pod: in this case it sets no condition and posts no event.

    Args:
        named: claims that the pod names.
        there: existing claims, including those that are being deleted.
        ending: claims that are being deleted.
    """
    missing = sorted(set(named) - set(there))
    held = sorted(set(named) & set(ending))
    if missing:
        return f"Pending: it names ResourceClaims that are not there: {', '.join(missing)}"
    if held:
        return f"Pending: it names ResourceClaims that are being deleted: {', '.join(held)}"
    return "Pending: the scheduler has not looked at it, though its ResourceClaims are there"


def claim_selector(pool: str) -> str:
    """Return the labels of a pool's claims."""
    return f"{MANAGED_BY}={MANAGER},{_POOL_LABEL}={pool}"


def slots_of(claims: Iterable[ResourceClaim]) -> list[Slot]:
    """Return the slots that new pods can name: all claims but those that are being deleted."""
    return [
        Slot(each.metadata.name, each.metadata.labels[GROUP_LABEL])
        for each in claims
        if each.metadata.deletion_timestamp is None and GROUP_LABEL in each.metadata.labels
    ]


def resident_of(pod: KubernetesObject) -> Resident | None:
    """Return a pod as a resident of its slots; None for a pod without slots, or one that is terminating."""
    named = pod.metadata.annotations.get(SLOTS)
    if not named or pod.metadata.deletion_timestamp is not None:
        return None
    labels = pod.metadata.labels
    return Resident(labels.get(JOB_LABEL, ""), labels.get(STAGE_LABEL, ""), tuple(named.split(",")))


def choose_slots(
    slots: Sequence[Slot], residents: Sequence[Resident], job: str, stage: str, gpus: int
) -> tuple[str, ...] | None:
    """Return the slots of a new pod, all from one group.

    Slots with the fewest pods of its own stage come first. Then comes the group with the fewest pods of the same stage
    of other jobs, because their work comes at the same time. Then come the slots with the fewest pods of other jobs,
    and then those with the fewest pods of its own: a learner may work beside preparation and the last actors.

    Args:
        slots: existing slots.
        residents: pods with slots.
        gpus: number of slots that the pod needs.

    Returns:
        Names of the slots; None if no group has that many.
    """
    groups: dict[str, list[str]] = {}
    for slot in slots:
        groups.setdefault(slot.group, []).append(slot.name)
    here = {slot.name: [each for each in residents if slot.name in each.slots] for slot in slots}

    def own(slot: str) -> int:
        return sum(each.job == job and each.stage == stage for each in here[slot])

    def crowd(slot: str) -> tuple[int, int, int, int, str]:
        same = sum(each.stage == stage for each in here[slot])
        others = sum(each.job != job for each in here[slot])
        return own(slot), same, others, len(here[slot]) - others, slot

    def key(group: str) -> tuple[list[int], int, list[tuple[int, int, int, int, str]]]:
        chosen = sorted(map(crowd, choices[group]), reverse=True)
        around = sum(each.stage == stage for name in groups[group] for each in here[name])
        return sorted(map(own, choices[group]), reverse=True), around, chosen

    choices = {group: sorted(names, key=crowd)[:gpus] for group, names in groups.items() if len(names) >= gpus}
    return tuple(sorted(choices[min(choices, key=key)])) if choices else None


def claims_patch(pod: Mapping[str, Any], slots: Sequence[Slot], chosen: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON patch (RFC 6902) that gives a new pod its slots.

    The pod names every claim of their group, and its function uses the chosen ones.
    """
    group = next(slot.group for slot in slots if slot.name == chosen[0])
    names = sorted(slot.name for slot in slots if slot.group == group)
    claims = [{"name": name, "resourceClaimName": name} for name in names]
    containers = pod["spec"]["containers"]
    position = [container["name"] for container in containers].index(CONTAINER)
    path = f"/spec/containers/{position}/resources"
    patch: list[dict[str, Any]] = []
    if "resources" not in containers[position]:
        patch.append({"op": "add", "path": path, "value": {}})
    annotation = SLOTS.replace("/", "~1")
    return [
        *patch,
        {"op": "add", "path": "/spec/resourceClaims", "value": claims},
        {"op": "add", "path": f"{path}/claims", "value": [{"name": name} for name in chosen]},
        {"op": "add", "path": f"/metadata/annotations/{annotation}", "value": ",".join(chosen)},
    ]


def gpus_of(pod: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the pool and the number of a new pod's slots; None for a pod that takes no turns."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    if POOL not in annotations or GPUS not in annotations:
        return None
    return str(annotations[POOL]), int(annotations[GPUS])
