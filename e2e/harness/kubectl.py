"""kubectl, as a user would type it, and waiting for what it shows."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Value = TypeVar("Value")

POLL_SECONDS = 0.5


class KubectlError(Exception):
    """kubectl said no; the message is its own."""


class Kubectl:
    """kubectl in one namespace.

    Args:
        namespace: where namespaced commands act.
        patience: factor of all time limits.
    """

    def __init__(self, namespace: str, patience: float = 1.0) -> None:
        self.namespace = namespace
        self.patience = patience

    def __call__(self, *arguments: str, given: str | bytes | None = None) -> str:
        """Run a command; its output.

        Args:
            given: standard input.

        Raises:
            KubectlError: if it fails.
        """
        text = given.encode() if isinstance(given, str) else given
        result = subprocess.run(["kubectl", "-n", self.namespace, *arguments], input=text, capture_output=True)
        if result.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {result.stderr.decode(errors='replace').strip()}")
        return result.stdout.decode(errors="replace")

    def apply(self, *manifests: dict[str, Any]) -> None:
        """Apply manifests."""
        self("apply", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """An object; empty if there is none."""
        text = self("get", kind, name, "--ignore-not-found", "--output=json")
        found: dict[str, Any] = json.loads(text) if text.strip() else {}
        return found

    def list(self, kind: str, **labels: str) -> list[dict[str, Any]]:
        """The objects of a kind with these labels; in their names `__` stands for `/` and `_` for `-`."""
        selector = ",".join(f"{key.replace('__', '/').replace('_', '-')}={value}" for key, value in labels.items())
        items: list[dict[str, Any]] = json.loads(self("get", kind, f"--selector={selector}", "--output=json"))["items"]
        return items

    def wait_until(self, what: str, look: Callable[[], Value | None], seconds: float) -> Value:
        """Look until there is something to see; that.

        Args:
            what: what is waited for, for the error.
            look: returns something true once it is there. A KubectlError counts as not yet.
            seconds: time limit, before patience.

        Raises:
            TimeoutError: naming `what`, and kubectl's last complaint.
        """
        deadline = time.monotonic() + seconds * self.patience
        complaint = ""
        while True:
            try:
                if value := look():
                    return value
                complaint = ""
            except KubectlError as error:
                complaint = f"; {error}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {seconds * self.patience:g} s: {what}{complaint}")
            time.sleep(POLL_SECONDS)

    def wait_for_pods(self, ready: int, seconds: float, **labels: str) -> Sequence[dict[str, Any]]:
        """Wait until exactly so many pods with these labels are ready, and no others are there; those pods."""

        def look() -> Sequence[dict[str, Any]] | None:
            pods = self.list("pods", **labels)
            settled = len(pods) == ready and all(is_ready(pod) for pod in pods)
            return (pods or [{}]) if settled else None

        found = self.wait_until(f"{ready} ready pods with {labels}", look, seconds)
        return found if ready else []


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod is ready and not terminating."""
    conditions = {entry["type"]: entry["status"] for entry in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
