"""A stand-in for Kueue: its CRD, cut down to what is used of it, and a few lines that write into the status of a
Workload what Kueue writes on an admission, an eviction and a requeue."""

from typing import Any

from tests.clusters.control_plane import ApiServer
from tests.controller.operator_harness import wait_for

LABEL = {"kueue.x-k8s.io/queue-name": "gpus"}
BEFORE = "2026-01-01T00:00:00Z"

ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
WORKLOADS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "workloads.kueue.x-k8s.io",
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/kueue"},
    },
    "spec": {
        "group": "kueue.x-k8s.io",
        "scope": "Namespaced",
        "names": {"kind": "Workload", "listKind": "WorkloadList", "plural": "workloads", "singular": "workload"},
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                **ANYTHING,
                                "required": ["podSets"],
                                "properties": {"active": {"type": "boolean", "default": True}},
                            },
                            "status": {
                                **ANYTHING,
                                "properties": {
                                    "conditions": {
                                        "type": "array",
                                        "items": {
                                            **ANYTHING,
                                            "required": ["type", "status"],
                                            "properties": {"type": {"type": "string"}, "status": {"type": "string"}},
                                        },
                                        "x-kubernetes-list-type": "map",
                                        "x-kubernetes-list-map-keys": ["type"],
                                    }
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}


class Kueue:
    """Does to the Workloads of a namespace what Kueue would do, when the test says so."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self._server = server
        self._path = f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/workloads"

    def workload(self) -> dict[str, Any] | None:
        """The one that there is."""
        _, answer = self._server.request("GET", self._path)
        (workload,) = answer["items"] or [None]
        return workload

    def say(self, *conditions: tuple[str, bool, str], admission: dict[str, Any] | None = None) -> None:
        workload = wait_for(self.workload)
        changed = {kind for kind, _, _ in conditions}
        kept = [each for each in workload.get("status", {}).get("conditions", []) if each["type"] not in changed]
        said = [
            {"type": kind, "status": str(true), "reason": reason, "message": reason, "lastTransitionTime": BEFORE}
            for kind, true, reason in conditions
        ]
        status = {"conditions": [*kept, *said], **({"admission": admission} if admission else {})}
        path = f"{self._path}/{workload['metadata']['name']}/status"
        code, answer = self._server.request("PATCH", path, {"status": status}, "application/merge-patch+json")
        assert code == 200, answer

    def admit(self, **counts: int) -> None:
        assignments = [{"name": stage, "count": count} for stage, count in counts.items()]
        self.say(
            ("QuotaReserved", True, "QuotaReserved"),
            ("Admitted", True, "Admitted"),
            ("Evicted", False, "QuotaReserved"),
            admission={"clusterQueue": "all", "podSetAssignments": assignments},
        )

    def evict(self) -> None:
        self.say(("Evicted", True, "Preempted"))

    def conditions(self) -> dict[str, str]:
        workload = self.workload() or {}
        return {each["type"]: each["status"] for each in workload.get("status", {}).get("conditions", [])}


def queued(job: dict[str, Any]) -> dict[str, Any]:
    job["metadata"]["labels"] = dict(LABEL)
    return job
