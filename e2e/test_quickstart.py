"""The very file that `rlhfless run` takes, applied with kubectl: the same training, with pods that come and go."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.chart import Chart
from harness.jobs import QUICKSTART, Jobs, PodCounts
from harness.kubectl import Kubectl
from harness.storage import Storage

NAME = "quickstart-grpo"
ROOT = f"/artifacts/runs/{NAME}"
STEPS = 48


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same job, run without a cluster, a thread an instance."""
    folder = tmp_path_factory.mktemp("laptop")
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(QUICKSTART), "--threads", "1"]
    subprocess.run([*command, "--artifacts", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / NAME


@pytest.fixture(scope="module")
def applied(chart: Chart, kubectl: Kubectl, laptop: Path) -> tuple[dict[str, Any], PodCounts]:
    """The job's status once it has ended, and what was seen of its pods."""
    jobs = Jobs(kubectl)
    with PodCounts(kubectl, NAME) as pods:
        jobs.apply_file(QUICKSTART)
        status = jobs.wait_succeeded(NAME, 3000)
        kubectl.wait_for_pods(0, 120, **{"rlhfless.io__job": NAME})
    return status, pods


def test_reward_rises(applied: tuple[dict[str, Any], PodCounts], storage: Storage) -> None:
    status, _ = applied
    assert (status["step"], status["progress"]) == (STEPS, f"{STEPS}/{STEPS}")
    assert float(status["cost"]) > 0
    summary = json.loads(storage.read(f"{ROOT}/summary.json"))
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
    print(json.dumps(summary))


def test_the_weights_are_those_of_the_laptop(
    applied: tuple[dict[str, Any], PodCounts], storage: Storage, laptop: Path
) -> None:
    here = hashlib.sha256((laptop / "model" / "model.safetensors").read_bytes()).hexdigest()
    there = storage.run("sha256sum", f"{ROOT}/model/model.safetensors").split()[0]
    assert there == here
    ours = json.loads((laptop / "summary.json").read_text())
    theirs = json.loads(storage.read(f"{ROOT}/summary.json"))
    assert theirs["accuracy_after"] == ours["accuracy_after"]


def test_pods_come_and_go_with_their_stages(applied: tuple[dict[str, Any], PodCounts]) -> None:
    _, pods = applied
    print({stage: (pods.rises(stage), pods.most(stage)) for stage in pods.counts})
    assert pods.most("generation") == 2
    # How often depends on how long pods take to start here: test_lifecycle.py has a job in which it does not.
    assert all(pods.rises(stage) >= 1 for stage in ("generation", "preparation", "learning"))
    assert all(counts[-1] == 0 for counts in pods.counts.values())


def test_kubectl_tells_step_reward_and_cost(applied: tuple[dict[str, Any], PodCounts], kubectl: Kubectl) -> None:
    header, row = kubectl("get", "rlhf", NAME).splitlines()
    assert header.split() == ["NAME", "PHASE", "STAGE", "STEP", "ACTORS", "REWARD", "COST", "AGE"]
    assert f"{STEPS}/{STEPS}" in row
    assert "Succeeded" in row
    assert "reward" in kubectl("explain", "rlhfjob.spec.rewards").lower()
