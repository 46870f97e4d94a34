"""Kueue's Workload of a job, and what its status demands of the job: pure functions of documents.

A job with the label `kueue.x-k8s.io/queue-name` runs while its Workload is admitted. The operator creates the Workload
and does what Kueue expects from an integration: it stops the job on an eviction, returns the quota once its pods are
gone, and reports when the job has finished (kubernetes-sigs/kueue, pkg/controller/jobframework/reconciler.go).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhfless_operator.job.spec import API_VERSION, KIND

GROUP = "kueue.x-k8s.io"
PLURAL = "workloads"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label with the LocalQueue of a job, which must be in the job's namespace."""
_UID_LABEL = "kueue.x-k8s.io/job-uid"
_REQUEUED_AFTER = ("Preempted", "NodeFailures")
"""Evictions after which a Workload is queued again immediately. After others it waits, some for the user."""

Document = dict[str, Any]
State = Literal["waiting", "admitted", "evicted"]


@dataclass(frozen=True)
class PodSet:
    """Pods of one stage, as Kueue counts them."""

    stage: str
    count: int
    """Most pods that the job uses at a time."""
    least: int
    """Fewest pods that it can work with."""
    template: Mapping[str, Any]
    """The pod template. Kueue reads its resources, tolerations, node selectors and similar fields."""


@dataclass(frozen=True)
class Admission:
    """Kueue's decision about a Workload."""

    state: State
    """`waiting`: the job may not run. `admitted`: it may. `evicted`: it must stop and return its quota."""
    message: str
    counts: Mapping[str, int]
    """Number of admitted pods by stage; partial admission may admit fewer than requested."""


def workload_name(job: str, uid: str) -> str:
    """Return the name of a job's Workload, which differs for two jobs with the same name."""
    return f"{KIND.lower()}-{job}-{hashlib.sha256(uid.encode()).hexdigest()[:5]}"


def workload(
    *, version: str, namespace: str, job: str, uid: str, queue: str, priority: int, pod_sets: Sequence[PodSet]
) -> Document:
    """Return the manifest of a job's Workload.

    Args:
        version: version of Kueue's API that the cluster serves, such as `v1beta2`.
    """
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "Workload",
        "metadata": {
            "name": workload_name(job, uid),
            "namespace": namespace,
            "labels": {_UID_LABEL: uid},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "name": job,
                    "uid": uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "queueName": queue,
            "priority": priority,
            "podSets": [
                {
                    "name": pod_set.stage,
                    "count": pod_set.count,
                    # Kueue allows a minimum count for one pod set only.
                    **({"minCount": pod_set.least} if pod_set.least < pod_set.count else {}),
                    "template": dict(pod_set.template),
                }
                for pod_set in pod_sets
            ],
        },
    }


def admission_of(document: Mapping[str, Any]) -> Admission:
    """Kueue's decision from a Workload's status."""
    status = document.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    admission = status.get("admission") or {}
    counts = {
        assigned["name"]: int(assigned["count"])
        for assigned in admission.get("podSetAssignments") or []
        if assigned.get("count") is not None
    }
    if _is_true(conditions, "Evicted"):
        return Admission("evicted", str(conditions["Evicted"].get("message", "")), counts)
    if _is_true(conditions, "Admitted"):
        return Admission("admitted", f"admitted by ClusterQueue {admission.get('clusterQueue', '?')}", counts)
    waiting = conditions.get("QuotaReserved") or {}
    queue = (document.get("spec") or {}).get("queueName", "?")
    return Admission("waiting", str(waiting.get("message") or f"Kueue has not looked at LocalQueue {queue} yet"), {})


def quota_released(document: Mapping[str, Any], *, now: str) -> Document | None:
    """Return the status of an evicted Workload whose pods are gone; None if there is no quota to return.

    Args:
        now: RFC 3339.
    """
    status = document.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    if not _is_true(conditions, "Evicted") or not _is_true(conditions, "QuotaReserved"):
        return None
    reason, message = conditions["Evicted"].get("reason", ""), conditions["Evicted"].get("message", "")
    generation = document["metadata"].get("generation", 0)
    changed = [
        _condition("QuotaReserved", False, "Pending", message, generation, now),
        _condition("Admitted", False, "NoReservation", "The workload has no reservation", generation, now),
        _condition("Requeued", reason in _REQUEUED_AFTER, reason, message, generation, now),
    ]
    return {"admission": None, "conditions": _with(status.get("conditions") or [], changed)}


def finished(document: Mapping[str, Any], *, succeeded: bool, message: str, now: str) -> Document | None:
    """Return the status of a Workload whose job has ended; None if it already says so."""
    conditions = (document.get("status") or {}).get("conditions") or []
    if _is_true({condition["type"]: condition for condition in conditions}, "Finished"):
        return None
    generation = document["metadata"].get("generation", 0)
    reason = "Succeeded" if succeeded else "Failed"
    return {"conditions": _with(conditions, [_condition("Finished", True, reason, message, generation, now)])}


def _is_true(conditions: Mapping[str, Mapping[str, Any]], kind: str) -> bool:
    return conditions.get(kind, {}).get("status") == "True"


def _condition(kind: str, true: bool, reason: str, message: str, generation: int, now: str) -> Document:
    return {
        "type": kind,
        "status": "True" if true else "False",
        "reason": reason or "Unknown",
        "message": message[:32768],
        "lastTransitionTime": now,
        "observedGeneration": generation,
    }


def _with(conditions: Sequence[Mapping[str, Any]], changed: Sequence[Document]) -> list[Document]:
    """Return all conditions, including the changed ones. A merge patch replaces the whole list."""
    replaced = {condition["type"]: condition for condition in changed}
    kept = []
    for condition in conditions:
        new = replaced.pop(condition["type"], None)
        if new is not None and new["status"] == condition.get("status"):
            new = {**new, "lastTransitionTime": condition.get("lastTransitionTime", new["lastTransitionTime"])}
        kept.append(dict(new or condition))
    return [*kept, *replaced.values()]
