"""What a job says to Kueue, and what Kueue says to it."""

from typing import Any

from rlhfless_operator.controller.kueue import (
    Admission,
    PodSet,
    admission_of,
    finished,
    quota_released,
    workload,
    workload_name,
)

NOW = "2026-01-02T03:04:05Z"
BEFORE = "2026-01-01T00:00:00Z"


def a_workload(*pod_sets: PodSet, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "version": "v1beta2",
        "namespace": "team",
        "job": "mine",
        "uid": "1234",
        "queue": "gpus",
        "priority": 3,
        "pod_sets": pod_sets,
    }
    return workload(**arguments | changes)


def said(*conditions: tuple[str, bool], admission: dict[str, Any] | None = None, reason: str = "R") -> dict[str, Any]:
    """A Workload about which Kueue has said this."""
    document = a_workload()
    document["metadata"]["generation"] = 2
    document["status"] = {
        "conditions": [
            {
                "type": kind,
                "status": str(true),
                "reason": reason,
                "message": f"{kind}!",
                "lastTransitionTime": BEFORE,
            }
            for kind, true in conditions
        ]
    }
    if admission:
        document["status"]["admission"] = admission
    return document


def statuses(status: dict[str, Any]) -> dict[str, str]:
    return {condition["type"]: condition["status"] for condition in status["conditions"]}


def test_the_workload_belongs_to_the_job_and_asks_for_the_pods_of_every_stage():
    template = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}
    made = a_workload(PodSet("generation", 8, 2, template), PodSet("learning", 1, 1, template))
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("RLHFJob", "1234", True)
    assert made["spec"] == {
        "queueName": "gpus",
        "priority": 3,
        "podSets": [
            {"name": "generation", "count": 8, "minCount": 2, "template": template},
            {"name": "learning", "count": 1, "template": template},
        ],
    }


def test_two_jobs_of_one_name_have_different_workloads():
    assert workload_name("mine", "1") != workload_name("mine", "2")


def test_a_job_waits_until_kueue_has_admitted_it():
    assert admission_of(a_workload()).state == "waiting"
    waiting = admission_of(said(("QuotaReserved", False)))
    assert (waiting.state, waiting.message) == ("waiting", "QuotaReserved!")
    assert admission_of(said(("QuotaReserved", True))).state == "waiting"


def test_admission_says_how_many_pods_there_may_be():
    admitted = {"clusterQueue": "all", "podSetAssignments": [{"name": "generation", "count": 5}, {"name": "learning"}]}
    document = said(("QuotaReserved", True), ("Admitted", True), admission=admitted)
    assert admission_of(document) == Admission("admitted", "admitted by ClusterQueue all", {"generation": 5})


def test_an_eviction_counts_though_the_admission_still_stands():
    evicted = said(("QuotaReserved", True), ("Admitted", True), ("Evicted", True))
    assert (admission_of(evicted).state, admission_of(evicted).message) == ("evicted", "Evicted!")


def test_an_eviction_that_is_over_is_none():
    assert admission_of(said(("Admitted", True), ("Evicted", False))).state == "admitted"


def test_the_quota_of_an_evicted_workload_is_given_back():
    evicted = said(("QuotaReserved", True), ("Admitted", True), ("Evicted", True), reason="Preempted")
    status = quota_released(evicted, now=NOW)
    assert status is not None
    assert status["admission"] is None
    expected = {"QuotaReserved": "False", "Admitted": "False", "Evicted": "True", "Requeued": "True"}
    assert statuses(status) == expected
    times = {condition["type"]: condition["lastTransitionTime"] for condition in status["conditions"]}
    assert times == {"QuotaReserved": NOW, "Admitted": NOW, "Evicted": BEFORE, "Requeued": NOW}
    assert quota_released(evicted | {"status": status}, now=NOW) is None


def test_a_workload_that_its_user_has_stopped_is_not_queued_again():
    stopped = quota_released(said(("QuotaReserved", True), ("Evicted", True), reason="Deactivated"), now=NOW)
    assert stopped is not None
    assert statuses(stopped)["Requeued"] == "False"


def test_nothing_is_given_back_without_an_eviction():
    assert quota_released(said(("QuotaReserved", True), ("Admitted", True)), now=NOW) is None
    assert quota_released(said(("Evicted", True), ("QuotaReserved", False)), now=NOW) is None


def test_a_finished_job_says_so_once():
    admitted = said(("QuotaReserved", True), ("Admitted", True))
    status = finished(admitted, succeeded=False, message="the loss is not finite", now=NOW)
    assert status is not None
    assert statuses(status) == {"QuotaReserved": "True", "Admitted": "True", "Finished": "True"}
    assert status["conditions"][-1]["reason"] == "Failed"
    assert finished(admitted | {"status": status}, succeeded=False, message="", now=NOW) is None
