"""CPU seconds of a cluster's nodes and of the containers on them, as the kubelets count them."""

import json
import threading
from collections import defaultdict
from typing import Any

from harness.kubectl import Kubectl, KubectlError
from rlhfless_functions.api import STAGES

SECONDS_BETWEEN_LOOKS = 10.0
"""A pod's last seconds are not seen."""
NANO = 1e-9


class CpuSeconds:
    """What the nodes and their containers used while the context lasts.

    Pods may come and go: what one has used counts from its start to the last time it was seen.
    """

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._nodes: dict[str, tuple[float, float]] = {}
        """CPU seconds of a node at the first look and at the last one."""
        self._containers: dict[tuple[str, str, str], tuple[float, float]] = {}
        """Those of a container, by what it is of, its pod's uid, and its name."""
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
        """CPU seconds of all nodes together; of the functions of each stage, and of the other containers of these
        tests; of each other namespace; and of everything else on the nodes."""
        nodes = sum(last - first for first, last in self._nodes.values())
        parts: dict[str, float] = defaultdict(float)
        for (part, *_), (first, last) in self._containers.items():
            parts[part] += last - first
        other = nodes - sum(parts.values())
        return {key: round(value, 1) for key, value in {"nodes": nodes, **parts, "not in pods": other}.items()}

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
            for container in pod.get("containers", ()):
                used, part = _used(container), self._part(pod["podRef"], container["name"])
                key = (part, pod["podRef"]["uid"], container["name"])
                # A container that was not there at the first look has begun since.
                began, before = self._containers.get(key, (used if first else 0.0, 0.0))
                self._containers[key] = (began, max(used, before))

    def _part(self, pod: dict[str, str], container: str) -> str:
        if pod["namespace"] != self._kubectl.namespace:
            return pod["namespace"]
        if container != "function":
            return container
        return next((stage for stage in STAGES if f"-{stage}-" in pod["name"]), container)


def _used(of: dict[str, Any]) -> float:
    return float(of.get("cpu", {}).get("usageCoreNanoSeconds", 0)) * NANO
