"""Whatever is killed, in whatever stage: the weights are those of an undisturbed run, no step lost or doubled."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.chart import Chart
from harness.jobs import Jobs, short
from harness.kubectl import Kubectl
from harness.storage import Storage

KEPT: dict[str, Any] = {"generation": {"instances": {"min": 2, "max": 2}, "keepAlive": "5m"}}
STEPS = 3
VICTIMS = ("operator", "generation", "preparation", "learning", "activator")
STAGES = ("generation", "preparation", "learning")


@pytest.fixture(scope="module")
def jobs(chart: Chart, kubectl: Kubectl) -> Jobs:
    return Jobs(kubectl)


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs, storage: Storage) -> Iterator[str]:
    """Checksum of the weights of a run in which nothing is killed."""
    jobs.apply(short("undisturbed", steps=STEPS, **KEPT))
    jobs.wait_succeeded("undisturbed", 600)
    yield weights_of(storage, "undisturbed")
    jobs.delete("undisturbed")


def weights_of(storage: Storage, name: str) -> str:
    return storage.run("sha256sum", f"/artifacts/runs/{name}/model/model.safetensors").split()[0]


def kill(kubectl: Kubectl, victim: str, name: str) -> None:
    """Without a warning, as a lost node does."""
    now = ("--grace-period=0", "--force", "--ignore-not-found", "--wait=false")
    match victim:
        case "operator":
            kubectl("delete", "pods", "--selector=app.kubernetes.io/instance=rlhfless", *now)
        case "activator":
            kubectl("--namespace=knative-serving", "delete", "pods", "--selector=app=activator", *now)
        case stage:
            kubectl("delete", "pods", f"--selector=rlhfless.io/job={name},rlhfless.io/stage={stage}", *now)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_changes_nothing(jobs: Jobs, storage: Storage, undisturbed: str, victim: str, stage: str) -> None:
    name = f"kill-{victim}-in-{stage}"
    jobs.apply(short(name, steps=STEPS, **KEPT))
    in_stage = "generation" if stage == "preparation" else stage

    def is_there(status: dict[str, Any]) -> bool:
        if status.get("step", 0) < 1 or status.get("stage") != in_stage:
            return False
        return stage != "preparation" or bool(prepared(storage, name, status["step"] + 1))

    jobs.wait(name, f"in {stage} of the second step", is_there, 400)
    kill(jobs.kubectl, victim, name)
    status = jobs.wait_succeeded(name, 600)
    assert status["step"] == STEPS
    assert weights_of(storage, name) == undisturbed
    steps = [json.loads(line)["step"] for line in storage.read(f"/artifacts/runs/{name}/metrics.jsonl").splitlines()]
    assert steps == list(range(1, STEPS + 1))
    jobs.delete(name)
    jobs.kubectl.wait_until("nothing is left", lambda: not jobs.objects(name), 120)


def prepared(storage: Storage, name: str, step: int) -> str:
    """The chunks of a step that preparation has been through."""
    folder = f"/artifacts/runs/{name}/batches/step-{step:06d}"
    return storage.run("sh", "-c", f"ls {folder} 2>/dev/null || true").strip()
