"""Which pod without a task has to end for one that has no memory on its node."""

from dataclasses import replace

from rlhfless_operator.planner.pools.host_memory import NodeMate, pod_to_end

HERE, ELSEWHERE = frozenset({"a", "b"}), frozenset({"c"})
STARVED = NodeMate("new", "job", "generation", HERE, "lacks memory")
OLD = NodeMate("old", "other", "generation", HERE, "resting", since=1.0)
YOUNG = NodeMate("young", "third", "generation", HERE, "resting", since=2.0)
WAITING = {("job", "generation")}


def test_the_one_that_has_had_no_task_for_longest_goes() -> None:
    assert pod_to_end([YOUNG, OLD, STARVED], WAITING) == "old"


def test_none_goes_for_a_pod_that_no_task_waits_for() -> None:
    assert pod_to_end([OLD, STARVED], set()) is None
    assert pod_to_end([OLD, replace(STARVED, state="other")], WAITING) is None


def test_pods_that_work_or_have_a_task_waiting_stay() -> None:
    assert pod_to_end([replace(OLD, state="other"), STARVED], WAITING) is None
    assert pod_to_end([OLD, YOUNG, STARVED], WAITING | {("other", "generation")}) == "young"


def test_pods_of_other_nodes_stay() -> None:
    assert pod_to_end([replace(OLD, claims=ELSEWHERE), STARVED], WAITING) is None
    assert pod_to_end([replace(OLD, claims=frozenset({"b", "c"})), STARVED], WAITING) == "old"


def test_one_goes_at_a_time() -> None:
    assert pod_to_end([replace(OLD, state="ending"), YOUNG, STARVED], WAITING) is None
    assert pod_to_end([replace(OLD, state="ending", claims=ELSEWHERE), YOUNG, STARVED], WAITING) == "young"


def test_jobs_of_lower_priority_go_first_and_learners_last() -> None:
    assert pod_to_end([replace(OLD, priority=1), YOUNG, STARVED], WAITING) == "young"
    assert pod_to_end([replace(OLD, stage="learning"), YOUNG, STARVED], WAITING) == "young"
    assert pod_to_end([replace(OLD, stage="learning"), STARVED], WAITING) == "old"
