"""Whether an asynchronous job lost a group or learnt from one twice, and whether a replay has its weights."""

import json
from typing import Any

from harness.kubectl import Kubectl
from harness.object_store import NAME
from harness.storage import MOUNTS, USER, VOLUMES, Storage

PROMPTS, SAMPLES = 8, 8
"""Of a step of a short job."""
_POD = "replayer"


def prompts_of(
    storage: Storage,
    folder: str,
    *,
    steps: int,
    staleness: int,
    switches: bool = False,
    size: tuple[int, int] = (PROMPTS, SAMPLES),
) -> list[list[int]]:
    """The prompts that each rollout of a job drew, by its journal. Steps are checked to have learnt from all of them.

    Args:
        folder: the job's, for `Storage`.
        staleness: the most that there may be.
        switches: whether newer weights than those that a rollout began with may have sampled a group.
        size: prompts of a step, and samples of a prompt.
    """
    begun, taken = (_entries(storage, folder, kind) for kind in ("begun", "taken"))
    assert [entry["step"] for entry in begun] == [entry["step"] for entry in taken] == list(range(1, steps + 1))
    versions = {entry["step"]: entry["policy"]["version"] for entry in begun}
    for entry in taken:
        for group in entry["groups"]:
            version = versions[group["rollout"]]
            assert version <= group["version"] <= (entry["base"] if switches else version)
            assert 0 <= entry["base"] - group["version"] <= staleness
        groups = sorted(group["prompt"] for group in entry["groups"])
        assert len(groups) == size[0]
        learnt = sorted((sample["prompt"], sample["index"]) for sample in entry["batch"]["samples"])
        assert learnt == sorted((prompt, index) for prompt in groups for index in range(size[1])), "groups are whole"
    drawn = sorted((entry["step"], prompt) for entry in begun for prompt in entry["prompts"])
    assert sorted((group["rollout"], group["prompt"]) for entry in taken for group in entry["groups"]) == drawn
    return [sorted(entry["prompts"]) for entry in begun]


def switched_responses(storage: Storage, folder: str) -> list[float]:
    """The share of each step's responses that several versions of the weights sampled."""
    records = [json.loads(line) for line in storage.read(f"{folder}/metrics.jsonl").splitlines()]
    return [record["metrics"]["generation/switched_responses"] for record in records if record["step"]]


class Replayer:
    """A pod in which `rlhfless replay` runs. It can read the object store if that is there before the pod is."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl

    def create(self, image: str, operator: str) -> None:
        """Start it, and wait until it is ready.

        Args:
            image: the functions', which has torch.
            operator: folder of the control plane's code, on the claim `files`.
        """
        self._kubectl.apply(_pod(image, operator))
        timeout = f"--timeout={int(120 * self._kubectl.patience)}s"
        self._kubectl("wait", f"pod/{_POD}", "--for=condition=Ready", timeout)

    def remove(self) -> None:
        """Delete it."""
        self._kubectl("delete", "pod", _POD, "--wait=false")

    def replay(self, run: str) -> str:
        """What the command says of a run's folder."""
        command = f"python -m rlhfless_operator replay {run} 2>&1 || true"
        return self._kubectl("exec", _POD, "--", "sh", "-c", command)


def _entries(storage: Storage, folder: str, kind: str) -> list[dict[str, Any]]:
    files = storage.run("sh", "-c", f"for each in {folder}/journal/*-{kind}.json; do cat $each; echo; done")
    return [json.loads(line) for line in files.splitlines()]


def _pod(image: str, operator: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": _POD},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "shell",
                    "image": image,
                    "command": ["sleep", "infinity"],
                    "workingDir": "/files",
                    "env": [{"name": "PYTHONPATH", "value": operator}],
                    "envFrom": [{"secretRef": {"name": NAME, "optional": True}}],
                    "securityContext": {"runAsUser": USER},
                    "volumeMounts": [*MOUNTS, {"name": "tmp", "mountPath": "/tmp"}],
                }
            ],
            "volumes": [*VOLUMES, {"name": "tmp", "emptyDir": {}}],
        },
    }
