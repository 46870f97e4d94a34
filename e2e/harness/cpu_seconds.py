"""CPU seconds of a cluster's nodes and of the pods on them, as their kubelets count them."""

import json
import threading
from collections import defaultdict
from typing import Any

from harness.kubectl import Kubectl, KubectlError

SECONDS_BETWEEN_LOOKS = 10.0
"""A pod's last seconds are not seen."""
NANO = 1e-9


class CpuSeconds:
    """What the nodes and the pods of each namespace used while the context lasts.

    Pods may come and go: what one has used counts from its start to the last time it was seen.
    """

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._nodes: dict[str, tuple[float, float]] = {}
        """CPU seconds of a node at the first look and at the last one."""
        self._pods: dict[tuple[str, str], tuple[float, float]] = {}
        """Those of a pod, by namespace and uid."""
        self._done = threading.Event()

    def __enter__(self) -> "CpuSeconds":
        self._look(first=True)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def figures(self) -> dict[str, float]:
        """CPU seconds of all nodes together, of the pods of each namespace, and of everything else on the nodes."""
        nodes = sum(last - first for first, last in self._nodes.values())
        by_namespace: dict[str, float] = defaultdict(float)
        for (namespace, _), (first, last) in self._pods.items():
            by_namespace["jobs" if namespace == self._kubectl.namespace else namespace] += last - first
        other = nodes - sum(by_namespace.values())
        return {key: round(value, 1) for key, value in {"nodes": nodes, **by_namespace, "not in pods": other}.items()}

    def _follow(self) -> None:
        while not self._done.wait(SECONDS_BETWEEN_LOOKS):
            self._look()

    def _look(self, *, first: bool = False) -> None:
        try:
            for node in self._kubectl("get", "nodes", "--output=name").split():
                name = node.removeprefix("node/")
                answer = self._kubectl("get", "--raw", f"/api/v1/nodes/{name}/proxy/stats/summary")
                self._note(name, json.loads(answer), first=first)
        except KubectlError:
            if first:
                raise
            # One look less.

    def _note(self, name: str, summary: dict[str, Any], *, first: bool) -> None:
        used = _used(summary["node"])
        self._nodes[name] = (self._nodes.get(name, (used, used))[0], used)
        for pod in summary["pods"]:
            reference, used = pod["podRef"], _used(pod)
            key = (reference["namespace"], reference["uid"])
            # A pod that was not there at the first look has begun since.
            began = self._pods.get(key, (used if first else 0.0, 0.0))[0]
            self._pods[key] = (began, max(used, self._pods.get(key, (0.0, 0.0))[1]))


def _used(of: dict[str, Any]) -> float:
    return float(of.get("cpu", {}).get("usageCoreNanoSeconds", 0)) * NANO
