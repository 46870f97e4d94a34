"""An asynchronous job loses its operator, its pods and the activator: no group is lost or learnt from twice."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.chart import Chart
from harness.images import ROOT, Images
from harness.jobs import Jobs, short, steps_of
from harness.kills import kill
from harness.kubectl import Kubectl
from harness.options import Options
from harness.storage import MOUNTS, USER, VOLUMES, Storage

VICTIMS = ("operator", "generation", "preparation", "learning", "activator")
STEPS = len(VICTIMS) + 3
PROMPTS, SAMPLES = 8, 8
STALENESS = 1
AHEAD: dict[str, Any] = {
    "async": {"maxStaleness": STALENESS},
    "checkpoints": {"keepRollouts": True, "everySteps": 2},
    "generation": {"instances": {"min": 2, "max": 2}, "keepAlive": "5m"},
    # There is a pod of each stage to kill at any time.
    "preparation": {"keepAlive": "5m"},
    "learning": {"keepAlive": "5m"},
}


@pytest.fixture
def jobs(chart: Chart, kubectl: Kubectl) -> Iterator[Jobs]:
    """The jobs."""
    yield Jobs(kubectl)
    kubectl("delete", "rlhfjobs", "ahead", "ahead-undisturbed", "--ignore-not-found", "--timeout=120s")


@pytest.fixture
def replayer(kubectl: Kubectl, storage: Storage, images: Images) -> Iterator[str]:
    """A pod of the functions' image, which has torch, with the control plane's code beside it; its name."""
    storage.put(ROOT / "operator", "/files/operator")
    kubectl.apply(_pod_of("replayer", images.functions))
    kubectl("wait", "pod/replayer", "--for=condition=Ready", f"--timeout={int(120 * kubectl.patience)}s")
    yield "replayer"
    kubectl("delete", "pod", "replayer", "--wait=false")


def test_whatever_is_killed_no_group_is_lost_or_doubled_and_the_replay_has_the_weights(
    jobs: Jobs, kubectl: Kubectl, storage: Storage, options: Options, replayer: str
) -> None:
    jobs.apply(short("ahead-undisturbed", steps=STEPS, **AHEAD))
    jobs.wait_succeeded("ahead-undisturbed", 900)
    wanted = prompts_of(storage, "ahead-undisturbed")

    jobs.apply(short("ahead", steps=STEPS, **AHEAD))
    for done, victim in enumerate(VICTIMS, start=1):
        jobs.wait("ahead", f"step {done} is done", lambda status, done=done: status.get("step", 0) >= done, 600)
        if victim not in ("operator", "activator"):
            labels = {"rlhfless.io__job": "ahead", "rlhfless.io__stage": victim}
            kubectl.wait_until(f"a pod of {victim}", lambda labels=labels: kubectl.list("pods", **labels), 300)
        assert jobs.status("ahead").get("phase") != "Succeeded", f"it was over before {victim} was killed"
        kill(kubectl, options, victim, "ahead")
    status = jobs.wait_succeeded("ahead", 1200)
    assert status["step"] == STEPS
    assert status["driver"]["lease"] >= 2, "another operator went on"
    assert steps_of(storage, "/artifacts/runs/ahead") == list(range(1, STEPS + 1))
    assert prompts_of(storage, "ahead") == wanted, "the groups are those of a run to which nothing happened"
    assert "the same weights bit for bit" in replay(kubectl, replayer, "ahead")


def prompts_of(storage: Storage, name: str) -> list[list[int]]:
    """The prompts that each step of a job learnt from, by its journal, which is checked."""
    begun, taken = (_entries(storage, name, kind) for kind in ("begun", "taken"))
    assert [entry["step"] for entry in begun] == [entry["step"] for entry in taken] == list(range(1, STEPS + 1))
    for first, entry in zip(begun, taken, strict=True):
        assert {group["version"] for group in entry["groups"]} == {first["policy"]["version"]}
        assert 0 <= entry["base"] - first["policy"]["version"] <= STALENESS
        groups = sorted(group["prompt"] for group in entry["groups"])
        assert len(set(groups)) == PROMPTS
        learnt = sorted((sample["prompt"], sample["index"]) for sample in entry["batch"]["samples"])
        assert learnt == [(prompt, index) for prompt in groups for index in range(SAMPLES)], "groups are whole"
    return [sorted(group["prompt"] for group in entry["groups"]) for entry in taken]


def replay(kubectl: Kubectl, pod: str, name: str) -> str:
    """What `rlhfless replay` says of a job's folder."""
    command = f"python -m rlhfless_operator replay /artifacts/runs/{name} 2>&1 || true"
    return kubectl("exec", pod, "--", "sh", "-c", command)


def _entries(storage: Storage, name: str, kind: str) -> list[dict[str, Any]]:
    files = storage.run(
        "sh", "-c", f"for each in /artifacts/runs/{name}/journal/*-{kind}.json; do cat $each; echo; done"
    )
    return [json.loads(line) for line in files.splitlines()]


def _pod_of(name: str, image: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "shell",
                    "image": image,
                    "command": ["sleep", "infinity"],
                    "workingDir": "/files",
                    "env": [{"name": "PYTHONPATH", "value": "/files/operator"}],
                    "securityContext": {"runAsUser": USER},
                    "volumeMounts": [*MOUNTS, {"name": "tmp", "mountPath": "/tmp"}],
                }
            ],
            "volumes": [*VOLUMES, {"name": "tmp", "emptyDir": {}}],
        },
    }
