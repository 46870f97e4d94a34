"""Who of the pods that use a GPU in turns is awake, by the pods' own logs."""

import itertools
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from harness.kubectl import Kubectl, is_ready

WAKES = "task started"
SLEEPS = "instance sleeps"


class AwakeSpans:
    """When each pod of a job was awake. Logs go with their pods, so somebody has to look again and again.

    Args:
        job: its name.
    """

    def __init__(self, kubectl: Kubectl, job: str) -> None:
        self._kubectl = kubectl
        self._job = job
        self.pods: dict[str, dict[str, Any]] = {}
        """All pods that were ever seen, by name."""
        self.spans: dict[str, list[tuple[datetime, datetime]]] = {}
        """Of each pod that was ever ready: from a task's start until it slept, or said its last word."""

    def look(self) -> None:
        """Read what is there now."""
        for pod in pods_of(self._kubectl, self._job):
            name = pod["metadata"]["name"]
            self.pods[name] = pod
            if is_ready(pod):
                self.spans[name] = awake_spans(self._kubectl, name)

    def check(self) -> None:
        """Fail if two pods were awake at once."""
        told = sorted((span, name) for name, spans in self.spans.items() for span in spans)
        overlaps = [
            f"{one} until {before[1]}, {other} from {after[0]}"
            for (before, one), (after, other) in itertools.pairwise(told)
            if before[1] > after[0]
        ]
        assert not overlaps, f"two were awake at once: {overlaps}"


def pods_of(kubectl: Kubectl, job: str, stage: str | None = None) -> list[dict[str, Any]]:
    """The pods of a job, or of one of its stages."""
    return kubectl.list("pods", **{"rlhfless.io__job": job}, **({"rlhfless.io__stage": stage} if stage else {}))


def awake_spans(kubectl: Kubectl, pod: str) -> list[tuple[datetime, datetime]]:
    """When a pod says that it was awake: from a task's start until it slept, or said its last word."""
    found = []
    since = None
    at = None
    for entry in _entries(kubectl, pod):
        at = datetime.fromisoformat(entry["time"])
        if entry["message"] == WAKES and since is None:
            since = at
        elif entry["message"] == SLEEPS and since is not None:
            found.append((since, at))
            since = None
    if since is not None and at is not None:
        found.append((since, at))
    return found


def is_awake(kubectl: Kubectl, pod: str) -> bool:
    """Whether a pod has begun with a task, and not slept since."""
    told = [entry["message"] for entry in _entries(kubectl, pod) if entry["message"] in (WAKES, SLEEPS)]
    return told[-1:] == [WAKES]


def has_slept(kubectl: Kubectl, pod: str) -> bool:
    """Whether a pod was awake once, and sleeps now."""
    told = [entry["message"] for entry in _entries(kubectl, pod) if entry["message"] in (WAKES, SLEEPS)]
    return WAKES in told and told[-1] == SLEEPS


def _entries(kubectl: Kubectl, pod: str) -> Iterator[dict[str, Any]]:
    for line in kubectl("logs", pod, "--container=function").splitlines():
        # Others are a library's own words.
        if line.startswith("{"):
            yield json.loads(line)
