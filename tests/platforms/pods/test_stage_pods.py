"""The book of a stage's pods: what the ledger is told, and what is read from a pod."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.platforms.pods.pod_watch import Pod, PodView, view_of
from rlhfless_operator.platforms.pods.stage_pods import StagePods


def pod(
    name: str = "p",
    *,
    ready: bool = False,
    deleting: bool = False,
    age: float = 0.0,
    phase: str = "Running",
    cost: str | None = None,
    **status: Any,
) -> PodView:
    now = datetime.now(UTC)
    conditions = status.pop("conditions", [{"type": "Ready", "status": "True" if ready else "False"}])
    metadata: dict[str, Any] = {
        "name": name,
        "uid": name,
        "labels": {"rlhfless.io/stage": "generation"},
        "annotations": {} if cost is None else {"controller.kubernetes.io/pod-deletion-cost": cost},
        "creationTimestamp": (now - timedelta(seconds=age)).isoformat(),
        "deletionTimestamp": now.isoformat() if deleting else None,
    }
    content = {"metadata": metadata, "status": {"phase": phase, "conditions": conditions, **status}}
    view = view_of(Pod.model_validate(content))
    assert view is not None
    return view


@pytest.fixture
def told() -> list[StateChange]:
    return []


@pytest.fixture
def book(told: list[StateChange]) -> StagePods:
    return StagePods("generation", told.append, lambda: None)


def states(told: list[StateChange], instance: str = "p") -> list[str]:
    return [change.state for change in told if change.instance == instance]


def test_a_pods_life_is_told_once(book: StagePods, told: list[StateChange]) -> None:
    for view in (pod(), pod(), pod(ready=True), pod(ready=True)):
        book.changed(view, first=False)
    book.requests = book.sending = 1
    book.taken("p")
    book.changed(pod(ready=True), first=False)
    book.left("p")
    book.changed(pod(ready=True, deleting=True), first=False)
    book.gone(pod(deleting=True))
    book.gone(pod(deleting=True))
    assert states(told) == ["starting", "idle", "busy", "idle", "draining", "ended"]


def test_a_deleted_pods_work_is_work_until_its_end(book: StagePods, told: list[StateChange]) -> None:
    book.changed(pod(ready=True), first=False)
    book.taken("p")
    book.changed(pod(ready=False, deleting=True), first=False)
    book.left("p")
    assert states(told) == ["starting", "idle", "busy", "draining"]


def test_a_pod_that_has_worked_before_it_is_told_to_be_ready_does_not_start_again(
    book: StagePods, told: list[StateChange]
) -> None:
    book.changed(pod(), first=False)
    book.taken("p")
    book.left("p")
    book.changed(pod(), first=False)
    assert states(told) == ["starting", "busy", "idle"]
    book.changed(pod(ready=True), first=False)
    assert states(told) == ["starting", "busy", "idle"]
    book.changed(pod(), first=False)
    assert states(told)[3:] == ["starting"], "it has stopped being ready since"


def test_a_pod_may_speak_before_the_watch_tells_of_it(book: StagePods, told: list[StateChange]) -> None:
    book.taken("p")
    book.changed(pod(ready=True), first=False)
    book.left("p")
    assert states(told) == ["busy", "idle"]


def test_a_pod_that_the_watch_never_tells_of_is_forgotten(book: StagePods, told: list[StateChange]) -> None:
    book.taken("p")
    book.left("p")
    assert states(told) == ["busy", "ended"]
    assert book.names == []


def test_starting_counts_from_the_pods_own_time_where_its_news_is_late(
    book: StagePods, told: list[StateChange]
) -> None:
    book.changed(pod("late", age=30.0), first=False)
    book.changed(pod("before", age=30.0), first=True)
    book.changed(pod("fresh", age=1.0), first=False)
    at = {change.instance: change.at for change in told}
    assert at["late"] < at["fresh"] - 25.0
    assert at["before"] > at["fresh"] - 25.0


def test_a_start_is_measured_of_pods_that_were_seen_to_start(book: StagePods, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    unmeasured = book.start_seconds
    book.changed(pod("before", ready=True), first=True)
    assert book.start_seconds == unmeasured, "it was ready before anybody looked"
    book.changed(pod("new"), first=False)
    now[0] += 7.0
    book.changed(pod("new", ready=True), first=False)
    assert book.start_seconds == 7.0
    now[0] += 100.0
    book.starts_anew("new")
    book.changed(pod("new"), first=False)
    now[0] += 3.0
    book.changed(pod("new", ready=True), first=False)
    assert book.start_seconds == 3.0


def test_an_evicted_pod_is_gone_though_its_object_stays(book: StagePods, told: list[StateChange]) -> None:
    book.changed(pod(ready=True), first=False)
    book.changed(pod(phase="Failed", reason="Evicted", message="low on memory"), first=False)
    assert states(told) == ["starting", "idle", "ended"]
    assert book.problem("p") == "p: Evicted: low on memory"


def test_what_keeps_a_pod_from_starting_is_its_problem_until_kubernetes_says_something(book: StagePods) -> None:
    changes = []
    book.on_change = lambda: changes.append(book.problem())
    waiting = pod(phase="Pending", conditions=[])
    assert waiting.overlooked
    book.changed(waiting, first=False)
    book.suspect("p", "Pending: its claim is not there")
    book.suspect("p", "Pending: its claim is not there")
    book.suspect("gone", "Pending: its claim is not there")
    book.changed(waiting, first=False)
    assert book.problem("p") == "p: Pending: its claim is not there"
    book.changed(pod(ready=True), first=False)
    assert changes == ["", *["p: Pending: its claim is not there"] * 2, ""]


def test_a_pod_that_its_node_does_not_prepare_is_told_of_after_a_while(book: StagePods) -> None:
    def waiting(prepared: str) -> PodView:
        conditions = {"PodScheduled": "True", "PodReadyToStartContainers": prepared, "Ready": "False"}
        return pod(
            phase="Pending", conditions=[{"type": kind, "status": status} for kind, status in conditions.items()]
        )

    now = time.monotonic()
    assert book.next_unprepared is None
    book.changed(waiting("False"), first=False)
    due = book.next_unprepared
    assert due is not None and due > now
    assert book.unprepared(now) == [] and book.problem() == ""
    (view,) = book.unprepared(due)
    book.suspect_unprepared(view, "")
    assert book.problem("p") == "p: Pending: its node has not prepared it for 15 s"
    # Kubernetes may say why only later.
    assert book.unprepared(due) == []
    again = book.next_unprepared
    assert again is not None and again > due
    (view,) = book.unprepared(again)
    book.suspect_unprepared(view, "FailedMount: no such volume")
    assert book.problem("p") == "p: Pending: its node has not prepared it for 15 s: FailedMount: no such volume"
    book.changed(waiting("False"), first=False)
    assert book.problem("p") != "", "news of the pod that change nothing"
    # From here on an image may be pulled, which takes its time.
    book.changed(waiting("True"), first=False)
    assert book.problem("p") == ""
    assert book.unprepared(again + 100) == [] and book.next_unprepared is None
    book.suspect_unprepared(view, "FailedMount: no such volume")
    assert book.problem("p") == "", "it was prepared while the reason was read"


def test_deletion_costs_are_highest_at_work_and_higher_for_what_is_kept(book: StagePods) -> None:
    book.changed(pod("busy", ready=True), first=False)
    book.changed(pod("kept", ready=True), first=False)
    book.changed(pod("done", ready=True, cost="1000"), first=False)
    book.changed(pod("new"), first=False)
    book.taken("busy")
    since = {view.name: cost for view, cost in book.wrong_costs(due_before=0.0)}
    assert since == {"busy": "1000", "kept": "100", "done": "100"}
    nothing_kept = {view.name: cost for view, cost in book.wrong_costs(due_before=float("inf"))}
    assert nothing_kept == {"busy": "1000", "done": None}


@pytest.mark.parametrize(
    ("status", "problem", "fatal"),
    [
        ({}, "", False),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
                ]
            },
            "Unschedulable: no GPU",
            False,
        ),
        (
            {"container_statuses": [{"name": "c", "state": {"waiting": {"reason": "ErrImagePull", "message": "m"}}}]},
            "ErrImagePull: container c: m",
            True,
        ),
        (
            {"container_statuses": [{"name": "c", "state": {"waiting": {"reason": "ContainerCreating"}}}]},
            "",
            False,
        ),
        (
            {
                "container_statuses": [
                    {
                        "name": "c",
                        "state": {"running": {}},
                        "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                    }
                ]
            },
            "container c ended: OOMKilled, exit code 137",
            False,
        ),
        (
            {
                "init_container_statuses": [
                    {
                        "name": "i",
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                        "lastState": {"terminated": {"reason": "Error", "exitCode": 2}},
                    }
                ]
            },
            "CrashLoopBackOff: container i: back-off; Error, exit code 2",
            True,
        ),
    ],
)
def test_what_is_wrong_with_a_pod_has_kubernetes_own_reason(status: dict[str, Any], problem: str, fatal: bool) -> None:
    view = pod(phase="Pending", **status)
    assert (view.problem, view.fatal) == (problem, fatal)


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({"container_statuses": [{"name": "c", "state": {"terminated": {"reason": "Error", "exitCode": 137}}}]}, ""),
        ({"phase": "Failed"}, ""),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        (
            {"container_statuses": [{"name": "c", "state": {"waiting": {"reason": "ErrImagePull", "message": "m"}}}]},
            "ErrImagePull: container c: m",
        ),
    ],
)
def test_that_containers_of_a_deleted_pod_are_killed_is_no_problem(status: dict[str, Any], problem: str) -> None:
    assert pod(deleting=True, **status).problem == problem


def test_a_pods_address_is_read(book: StagePods) -> None:
    book.changed(pod(ready=True, podIP="10.0.0.7"), first=False)
    view = book.view("p")
    assert view is not None
    assert view.ip == "10.0.0.7"


def test_a_stage_is_hopeless_only_if_all_its_pods_are(book: StagePods) -> None:
    broken = [{"name": "c", "state": {"waiting": {"reason": "ErrImagePull", "message": "m"}}}]
    assert not book.hopeless()
    book.changed(pod("broken", container_statuses=broken), first=False)
    assert book.hopeless()
    book.changed(pod("well"), first=False)
    assert not book.hopeless()


def test_another_drivers_book_ends_this_one(book: StagePods, told: list[StateChange]) -> None:
    book.changed(pod(ready=True), first=False)
    book.forget()
    book.gone(pod(ready=True))
    assert states(told) == ["starting", "idle", "ended"]


def test_what_a_fresh_pod_loads_is_part_of_its_first_task_and_a_wake_is_not(told: list[StateChange]) -> None:
    book = StagePods("learning", told.append, lambda: None, begin_asleep=True)
    book.changed(pod(), first=False)
    book.changed(pod(ready=True), first=False)
    for _ in range(2):
        book.taken("p")
        book.works("p")
        book.left("p")
        book.falls_asleep("p")
        book.sleeps("p")
    assert states(told) == [
        *("starting", "asleep", "busy", "idle", "switching", "asleep"),
        *("switching", "busy", "idle", "switching", "asleep"),
    ]
