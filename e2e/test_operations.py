"""What platform engineers do while jobs run: evict pods, set a quota, upgrade the chart, uninstall it."""

from collections.abc import Iterator
from typing import Any

import pytest

from harness.chart import Chart
from harness.jobs import KEPT, Jobs, finish_as, reach, short
from harness.kubectl import Kubectl
from harness.storage import Storage


@pytest.fixture
def jobs(chart: Chart, kubectl: Kubectl) -> Jobs:
    return Jobs(kubectl)


def test_evicted_pods_hand_over_their_work(jobs: Jobs, storage: Storage, undisturbed: str) -> None:
    kubectl = jobs.kubectl
    root = reach("generation", jobs, storage, short("evicted", **KEPT))
    # As `kubectl drain` does it, which would also evict what the rest of the cluster runs on its only node.
    for pod in kubectl.list("pods", **{"rlhfless.io__job": "evicted"}):
        evict(kubectl, pod["metadata"]["name"])
    finish_as(undisturbed, jobs, storage, "evicted", root)


def evict(kubectl: Kubectl, pod: str) -> None:
    eviction = f'{{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {{"name": "{pod}"}}}}'
    kubectl("create", "--raw", f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/eviction", "-f", "-", given=eviction)


@pytest.fixture
def full_quota(kubectl: Kubectl) -> Iterator[dict[str, Any]]:
    """A quota that has room for one more pod, and none for the functions of a job."""
    pods = len(kubectl("get", "pods", "--selector=!rlhfless.io/job", "--output=name").split())
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"}}
    kubectl.apply(quota | {"spec": {"hard": {"pods": str(pods + 1)}}})
    yield quota
    kubectl("delete", "resourcequota", "tight", "--ignore-not-found")


def test_a_job_waits_for_quota_and_goes_on(
    jobs: Jobs, storage: Storage, undisturbed: str, full_quota: dict[str, Any]
) -> None:
    jobs.apply(short("squeezed", **KEPT))
    jobs.kubectl.wait_until(
        "the quota is named",
        lambda: "tight" in jobs.kubectl("get", "events", "--field-selector=reason=FailedCreate", "--output=json"),
        300,
    )
    assert jobs.status("squeezed").get("phase") not in ("Failed", "Succeeded")
    jobs.kubectl("delete", "resourcequota", "tight")
    finish_as(undisturbed, jobs, storage, "squeezed", storage.job("squeezed"))


def test_an_upgrade_in_mid_run_changes_nothing(jobs: Jobs, storage: Storage, undisturbed: str, chart: Chart) -> None:
    root = reach("generation", jobs, storage, short("upgraded", **KEPT))
    chart.install(operator={"podAnnotations": {"rlhfless.io/upgraded": "true"}})
    finish_as(undisturbed, jobs, storage, "upgraded", root)


def test_an_uninstalled_chart_leaves_jobs_that_can_be_deleted(jobs: Jobs, chart: Chart, kubectl: Kubectl) -> None:
    jobs.apply(short("orphaned", steps=20, **KEPT))
    jobs.wait("orphaned", "a step is done", lambda status: status.get("step", 0) >= 1, 400)
    chart.uninstall()
    try:
        assert "orphaned" in kubectl("get", "rlhf")
        jobs.delete("orphaned", wait=False)
        # docs/operations.md: no operator is left to remove the finalizer.
        kubectl("patch", "rlhf", "orphaned", "--type=merge", '--patch={"metadata":{"finalizers":null}}')
        kubectl.wait_until("nothing is left", lambda: not jobs.objects("orphaned"), 180)
    finally:
        chart.install()
