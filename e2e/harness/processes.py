"""Signals to the processes of pods. kubectl can't send them: a container's first process ignores those from inside."""

import signal
from typing import Any

from harness.kubectl import Kubectl

_FIND_AND_SIGNAL = """
import os, sys
from pathlib import Path
number, *containers = sys.argv[1:]
found = []
for folder in Path("/proc").iterdir():
    try:
        cgroups = (folder / "cgroup").read_text() if folder.name.isdigit() else ""
        if any(container in cgroups for container in containers):
            os.kill(int(folder.name), int(number))
            found.append(folder.name)
    except (FileNotFoundError, ProcessLookupError):
        continue
if not found:
    sys.exit(f"no process is in the cgroup of a container {containers}")
print(*found)
"""


class Processes:
    """The processes of a namespace's pods, through pods that see all processes of their node.

    Args:
        image: an image with Python.
    """

    def __init__(self, kubectl: Kubectl, image: str) -> None:
        self._kubectl = kubectl
        self._image = image
        self._helpers: dict[str, str] = {}
        """Names of the pods that send signals, by node."""

    def prepare(self, node: str) -> None:
        """Have signals to pods of a node take no longer than a command."""
        if node in self._helpers:
            return
        name = self._helpers[node] = f"signals-{len(self._helpers)}"
        self._kubectl.apply(_helper(name, node, self._image))
        timeout = f"--timeout={int(120 * self._kubectl.patience)}s"
        self._kubectl("wait", f"pod/{name}", "--for=condition=Ready", timeout)

    def stop(self, pod: dict[str, Any]) -> None:
        """Have a function do nothing at all until it goes on; its connections stay open."""
        self._signal(pod, signal.SIGSTOP, "function")

    def go_on(self, pod: dict[str, Any]) -> None:
        """Let a function that was stopped go on."""
        self._signal(pod, signal.SIGCONT, "function")

    def kill(self, pod: dict[str, Any]) -> None:
        """End all containers of a pod at once. The kubelet starts them again."""
        self._signal(pod, signal.SIGKILL, *(each["name"] for each in pod["spec"]["containers"]))

    def remove(self) -> None:
        """Delete the pods that send signals."""
        if self._helpers:
            self._kubectl("delete", "pods", *self._helpers.values(), "--ignore-not-found", "--wait=false")

    def _signal(self, pod: dict[str, Any], number: signal.Signals, *containers: str) -> None:
        self.prepare(pod["spec"]["nodeName"])
        statuses = pod["status"]["containerStatuses"]
        # As in containerd://ID.
        ids = [each["containerID"].rpartition("/")[2] for each in statuses if each["name"] in containers]
        helper = self._helpers[pod["spec"]["nodeName"]]
        self._kubectl("exec", helper, "--", "python3", "-c", _FIND_AND_SIGNAL, str(int(number)), *ids)


def _helper(name: str, node: str, image: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "hostPID": True,
            "nodeName": node,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "shell",
                    "image": image,
                    "command": ["sleep", "infinity"],
                    "securityContext": {"privileged": True, "runAsUser": 0},
                }
            ],
        },
    }
