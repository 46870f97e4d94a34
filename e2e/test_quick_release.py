"""Function pods that go quickly, by the chart's webhook: what they are created with, and what a job then costs."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.chart import Chart
from harness.jobs import Jobs, short, steps_of, weights_of
from harness.kubectl import Kubectl
from harness.storage import Storage
from rlhfless_functions.api import STAGES

STEPS = 4
GRACE_SECONDS = 5
NOT_KEPT: dict[str, Any] = {"generation": {"instances": {"min": 2, "max": 2}, "keepAlive": "0s"}}
"""Pods come and go with every step."""


def run(jobs: Jobs, storage: Storage, name: str) -> tuple[dict[str, Any], str, dict[str, dict[str, Any]]]:
    """The status and the checksum of the weights of a job, once it has succeeded, and its pods by name."""
    pods: dict[str, dict[str, Any]] = {}

    def succeeded(status: dict[str, Any]) -> bool:
        for pod in jobs.kubectl.list("pods", **{"rlhfless.io__job": name}):
            pods[pod["metadata"]["name"]] = pod
        return status.get("phase") == "Succeeded"

    jobs.apply(short(name, steps=STEPS, **NOT_KEPT))
    status = jobs.wait(name, "succeeded", succeeded, 900)
    root = storage.job(name)
    assert steps_of(storage, root) == list(range(1, STEPS + 1))
    weights = weights_of(storage, root)
    jobs.delete(name)
    return status, weights, pods


def hooked(pod: dict[str, Any]) -> dict[str, bool]:
    """Whether each container has a preStop hook."""
    return {each["name"]: "preStop" in each.get("lifecycle", {}) for each in pod["spec"]["containers"]}


def is_released_quickly(kubectl: Kubectl) -> bool:
    """Whether the webhook answers the API server about a function's pod."""
    hook = {"preStop": {"httpGet": {"path": "/wait-for-drain", "port": 8022}}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "tried", "labels": {"rlhfless.io/job": "tried"}},
        "spec": {"containers": [{"name": "function", "image": "none", "lifecycle": hook}]},
    }
    created = json.loads(kubectl("create", "--dry-run=server", "--output=json", "--filename=-", given=json.dumps(pod)))
    return bool(created["spec"]["terminationGracePeriodSeconds"] == GRACE_SECONDS)


@pytest.fixture
def slow_release(chart: Chart, kubectl: Kubectl) -> Iterator[Callable[[], None]]:
    """Pods go as Knative has it. Called, it has the chart as it is by default again."""
    chart.install(quickRelease={"enabled": False})
    assert not is_released_quickly(kubectl)

    def restore() -> None:
        chart.install()
        kubectl.wait_until("the webhook answers the API server", lambda: is_released_quickly(kubectl), 60)

    yield restore
    chart.install()


def test_pods_go_quickly_by_default_and_the_weights_are_the_same(
    slow_release: Callable[[], None], kubectl: Kubectl, storage: Storage
) -> None:
    jobs = Jobs(kubectl)
    slow_status, slow_weights, slow_pods = run(jobs, storage, "slow-release")
    assert all(pod["spec"]["terminationGracePeriodSeconds"] > GRACE_SECONDS for pod in slow_pods.values())
    assert all(hooked(pod)["function"] for pod in slow_pods.values())
    slow_release()
    status, weights, pods = run(jobs, storage, "quick-release")
    assert {pod["metadata"]["labels"]["rlhfless.io/stage"] for pod in pods.values()} == set(STAGES)
    assert {pod["spec"]["terminationGracePeriodSeconds"] for pod in pods.values()} == {GRACE_SECONDS}
    assert not any(hooked(pod)["function"] for pod in pods.values())
    assert weights == slow_weights
    figures = {
        name: {"instance_seconds": each["instanceSeconds"], "pods": len(seen)}
        for name, each, seen in (("without", slow_status, slow_pods), ("with", status, pods))
    }
    print(json.dumps(figures))
