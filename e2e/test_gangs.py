"""Two learning pods come to the weights of one, also where one is lost, or never comes."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from harness.chart import Chart
from harness.jobs import STEPS, Jobs, reach, short
from harness.kubectl import Kubectl
from harness.storage import Storage

LEARNING: dict[str, Any] = {"processes": 1, "keepAlive": "5m", "instances": {"min": 1, "max": 2}}
GIVEN: dict[str, Any] = {
    # A step's learning lasts longer than it takes to find and delete one of its pods.
    "algorithm": {"epochs": 4},
    # Adam divides a gradient by its own size: with a tiny epsilon, rounding alone would decide where gradients vanish.
    "optimizer": {"epsilon": 1e-3},
    "checkpoints": {"everySteps": 1},
    "generation": {"instances": {"min": 1, "max": 1}, "keepAlive": "5m"},
}


@pytest.fixture(scope="module")
def jobs(chart: Chart, kubectl: Kubectl) -> Iterator[Jobs]:
    """The jobs."""
    yield Jobs(kubectl)


@pytest.fixture(scope="module")
def alone(jobs: Jobs, storage: Storage) -> str:
    """The folder of the job with one learning pod."""
    jobs.apply(short("one-learner", **GIVEN, learning={**LEARNING, "instances": {"max": 1}}))
    jobs.wait_succeeded("one-learner", 900)
    jobs.delete("one-learner")
    return storage.job("one-learner")


def learners(storage: Storage, root: str) -> list[int]:
    """How many instances took each step."""
    lines = storage.read(f"{root}/metrics.jsonl").splitlines()
    return [int(json.loads(line)["metrics"]["learning/instances"]) for line in lines]


def tensors(storage: Storage, root: str) -> dict[str, np.ndarray]:
    """The model that a job has exported."""
    return load(base64.b64decode(storage.run("base64", f"{root}/model/model.safetensors")))


def distance(storage: Storage, root: str, other: str) -> float:
    """The largest difference of any weight."""
    found, expected = tensors(storage, root), tensors(storage, other)
    assert found
    assert found.keys() == expected.keys()
    return max(float(np.abs(tensor - expected[name]).max()) for name, tensor in found.items())


def test_two_pods_come_to_the_weights_of_one(jobs: Jobs, storage: Storage, alone: str) -> None:
    jobs.apply(short("two-learners", **GIVEN, learning=LEARNING))
    jobs.wait_succeeded("two-learners", 900)
    jobs.delete("two-learners")
    root = storage.job("two-learners")
    assert learners(storage, root) == [2] * STEPS
    assert distance(storage, root, alone) <= 1e-6 * STEPS


def test_a_step_goes_on_without_a_pod_that_is_lost(jobs: Jobs, kubectl: Kubectl, storage: Storage, alone: str) -> None:
    name = "lost-learner"
    root = reach("learning", jobs, storage, short(name, **GIVEN, learning=LEARNING))
    pods = kubectl.list("pods", **{"rlhfless.io__job": name, "rlhfless.io__stage": "learning"})
    assert len(pods) == 2
    now = ("--grace-period=0", "--force", "--wait=false")
    kubectl("delete", "pod", pods[0]["metadata"]["name"], *now)
    jobs.wait_succeeded(name, 900)
    assert 1 in learners(storage, root), "no step was taken without the lost pod"
    assert distance(storage, root, alone) <= 1e-6 * STEPS
    jobs.delete(name)


def test_a_pod_that_never_comes_is_waited_for_once(jobs: Jobs, kubectl: Kubectl, storage: Storage, alone: str) -> None:
    name, root = "lonely-learner", storage.job("lonely-learner")
    most = max(int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) for node in kubectl.list("nodes"))
    if most < 2:
        pytest.skip("no node offers two nvidia.com/gpu, of which a learning pod could take more than half")
    pods = {"resources": {"limits": {"nvidia.com/gpu": str(most // 2 + 1)}}}
    jobs.apply(short(name, **GIVEN, learning={**LEARNING, "gangTimeout": "20s", "pods": pods}))
    jobs.wait_succeeded(name, 900)
    assert learners(storage, root) == [1] * STEPS
    assert distance(storage, root, alone) <= 1e-6 * STEPS
    jobs.delete(name)
