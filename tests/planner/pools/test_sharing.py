"""How jobs share a pool of GPUs."""

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.pools.sharing import Pool, SlotRequest, share
from rlhfless_operator.planner.pools.turns import MOST_PASSED


def request(job: str, wanted: int, *, stage: str = "generation", working: int = 0, **more) -> SlotRequest:
    return SlotRequest(
        job=job, stage=stage, **{"namespace": "default", "gpus": 1, "working": working, "wanted": wanted, **more}
    )


def test_everybody_gets_what_there_is_enough_of():
    assert share([request("a", 3), request("b", 2)], Pool(8)) == {("a", "generation"): 3, ("b", "generation"): 2}


def test_equals_get_equal_parts_of_what_is_scarce():
    granted = share([request("a", 8), request("b", 8), request("c", 1)], Pool(7))
    assert granted == {("a", "generation"): 3, ("b", "generation"): 3, ("c", "generation"): 1}


def test_the_higher_priority_comes_first():
    assert share([request("a", 4), request("b", 4, priority=1)], Pool(5)) == {
        ("a", "generation"): 1,
        ("b", "generation"): 4,
    }


def test_work_that_has_begun_is_never_taken_away():
    granted = share([request("a", 4, working=4), request("b", 4, priority=9)], Pool(5))
    assert granted == {("a", "generation"): 4, ("b", "generation"): 1}


def test_a_jobs_stages_count_together():
    requests = [request("a", 4), request("a", 1, stage="learning", working=1), request("b", 4)]
    granted = share(requests, Pool(5))
    assert granted["a", "generation"] + granted["a", "learning"] == 3
    assert granted["b", "generation"] == 2


def test_among_equals_the_one_that_had_least_comes_first():
    granted = share([request("a", 1, used=100.0), request("b", 1, used=10.0)], Pool(1))
    assert granted == {("a", "generation"): 0, ("b", "generation"): 1}


def test_a_job_keeps_an_idle_instance_within_its_fair_part():
    requests = [request("a", 0, stage="learning", kept=1), request("b", 4, working=2)]
    assert share(requests, Pool(4)) == {("a", "learning"): 1, ("b", "generation"): 3}


def test_a_kept_instance_gives_way_to_work_of_its_own_job():
    requests = [request("a", 1), request("a", 0, stage="learning", kept=1)]
    assert share(requests, Pool(1)) == {("a", "generation"): 1, ("a", "learning"): 0}


def test_a_kept_instance_gives_way_to_a_job_that_has_nothing():
    requests = [request("a", 0, stage="learning", kept=1), request("b", 1, used=100.0)]
    assert share(requests, Pool(1)) == {("a", "learning"): 0, ("b", "generation"): 1}


def test_beyond_its_fair_part_a_job_keeps_what_nobody_wants():
    assert share([request("a", 0, kept=3), request("b", 1)], Pool(4))["a", "generation"] == 3
    assert share([request("a", 0, kept=3), request("b", 2)], Pool(4))["a", "generation"] == 2


def test_a_kept_instance_that_does_not_fit_holds_nobody_up():
    requests = [request("a", 0, kept=1, gpus=4), request("b", 3, working=1)]
    assert share(requests, Pool(4)) == {("a", "generation"): 0, ("b", "generation"): 3}


def test_a_namespace_stays_within_its_quota_and_holds_nobody_up():
    requests = [request("a", 4, namespace="small", priority=1), request("b", 4)]
    assert share(requests, Pool(8, {"small": 2})) == {("a", "generation"): 2, ("b", "generation"): 4}


def test_room_is_kept_for_a_large_instance():
    requests = [request("big", 1, gpus=4), request("small", 8, working=1)]
    assert share(requests, Pool(4)) == {("big", "generation"): 0, ("small", "generation"): 1}


def gang(job: str, wanted: int, **more) -> SlotRequest:
    return request(job, wanted, **{"stage": "learning", "together": True, "place": 2, **more})


def test_a_gang_has_all_of_its_gpus_or_none():
    granted = share([gang("a", 4), gang("b", 4)], Pool(6))
    assert granted == {("a", "learning"): 4, ("b", "learning"): 0}
    assert share([gang("a", 4, working=4), gang("b", 4)], Pool(6))["b", "learning"] == 0
    assert share([gang("b", 4)], Pool(6))["b", "learning"] == 4


def test_small_tasks_pass_a_gang_that_could_not_begin_anyway_and_leave_it_its_gpus_at_last():
    """Six GPUs: a gang of four waits for tasks that began before it, and two GPUs are the others'."""
    small = request("small", 6, working=3, begun=[0, 1, 2])
    waiting = gang("a", 4, since=3)
    assert share([small, waiting], Pool(6), begun=3) == {("small", "generation"): 5, ("a", "learning"): 0}
    later = request("small", 6, working=3, begun=[2, 3, 4])
    assert share([later, waiting], Pool(6), begun=5) == {("small", "generation"): 3, ("a", "learning"): 0}
    last = request("small", 6, working=2, begun=[3, 4])
    assert share([last, waiting], Pool(6), begun=5) == {("small", "generation"): 2, ("a", "learning"): 4}


def test_a_gang_that_too_many_have_passed_comes_first():
    """Its job has a GPU already, and those of the others have none."""
    others = [request(f"small-{number}", 1, since=40) for number in range(5)]
    own = request("a", 1, working=1, begun=[40])
    passed = gang("a", 4, since=40 - MOST_PASSED)
    granted = share([own, *others, gang("a", 4, since=40)], Pool(6), begun=41)
    assert granted["a", "learning"] == 0
    granted = share([own, *others, passed], Pool(6), begun=41)
    assert (granted["a", "learning"], sum(granted.values())) == (4, 6)


def test_a_gang_that_its_quota_has_no_room_for_holds_its_own_namespace_up_alone():
    pool = Pool(8, {"small": 4})
    requests = [
        request("x", 4, namespace="small", working=2, begun=[1, 2]),
        gang("a", 4, namespace="small", since=1),
        request("y", 8, namespace="other"),
    ]
    granted = share(requests, pool, begun=3)
    assert granted == {("x", "generation"): 2, ("a", "learning"): 0, ("y", "generation"): 6}


def test_a_gang_is_kept_whole_within_its_fair_part_or_not_at_all():
    kept = gang("a", 0, kept=3)
    assert share([kept, request("b", 6)], Pool(6)) == {("a", "learning"): 3, ("b", "generation"): 3}
    assert share([kept, request("b", 6)], Pool(5)) == {("a", "learning"): 0, ("b", "generation"): 5}


def test_a_jobs_learners_come_before_its_generation():
    granted = share([request("a", 6), gang("a", 4)], Pool(6))
    assert granted == {("a", "generation"): 2, ("a", "learning"): 4}


def test_a_gang_that_could_never_run_is_refused():
    with pytest.raises(ValueError, match=r"4 instances of learning that work together ask for 8 GPUs"):
        share([gang("a", 4, gpus=2)], Pool(6))


def test_what_needs_no_gpu_always_runs():
    requests = [request("a", 4, working=4), request("b", 2, stage="preparation", gpus=0)]
    assert share(requests, Pool(4))["b", "preparation"] == 2


def test_an_instance_that_could_never_run_is_refused():
    with pytest.raises(ValueError, match=r"asks for 4 GPUs, and namespace default may have 2 of the pool's 8"):
        share([request("a", 1, gpus=4)], Pool(8, {"default": 2}))


@st.composite
def claims_and_pool(draw):
    pool = Pool(draw(st.integers(4, 12)), draw(st.dictionaries(st.sampled_from("mn"), st.integers(2, 6))))
    requests, free = [], pool.gpus
    in_namespace = defaultdict(int)
    for number in range(draw(st.integers(1, 5))):
        namespace, gpus = draw(st.sampled_from("mno")), draw(st.integers(0, 2))
        room = min(free, pool.namespaces.get(namespace, pool.gpus) - in_namespace[namespace])
        working = draw(st.integers(0, room // gpus if gpus else 2))
        together = bool(gpus) and not working and draw(st.booleans())
        most = min(pool.gpus, pool.namespaces.get(namespace, pool.gpus)) // gpus if together else 6
        free -= working * gpus
        in_namespace[namespace] += working * gpus
        requests.append(
            request(
                f"job-{number}",
                draw(st.integers(0, most)),
                working=working,
                together=together,
                since=draw(st.integers(0, 40)),
                begun=draw(st.lists(st.integers(0, 40), min_size=working, max_size=working).map(tuple)),
                namespace=namespace,
                gpus=gpus,
                kept=draw(st.integers(0, 2)),
                priority=draw(st.integers(0, 2)),
                used=draw(st.floats(0, 10)),
            )
        )
    return requests, pool


@given(claims_and_pool())
def test_no_limit_is_passed_no_gpu_is_wasted_and_nobody_who_works_is_stopped(drawn):
    requests, pool = drawn
    granted = {each: share(requests, pool, 41)[each.job, each.stage] for each in requests}
    in_namespace = defaultdict(int)
    for each, count in granted.items():
        assert each.working <= count <= max(each.working, each.wanted) + each.kept
        if each.together:
            most = max(each.working, each.wanted)
            assert count in {each.working, each.working + each.kept, most, most + each.kept}
        in_namespace[each.namespace] += count * each.gpus
    free = pool.gpus - sum(in_namespace.values())
    assert free >= 0
    assert all(in_namespace[name] <= quota for name, quota in pool.namespaces.items())
    for each, count in granted.items():
        left = min(free, pool.namespaces.get(each.namespace, pool.gpus) - in_namespace[each.namespace])
        if count < each.wanted and asks(each) <= left:
            # What is free is kept for a larger one, and is less than that needs.
            assert any(granted[other] < other.wanted and asks(other) > left for other in requests)


def asks(request: SlotRequest) -> int:
    """GPUs that it can't do with less of."""
    return request.gpus * (request.wanted - request.working if request.together else 1)


@given(claims_and_pool())
def test_the_order_of_the_claims_makes_no_difference(drawn):
    requests, pool = drawn
    assert share(requests, pool, 41) == share(requests[::-1], pool, 41)


# --- whole schedules: jobs that always have something to do ---


@dataclass
class Worker:
    """A stage of a job that asks for its next tasks as soon as the last ones are over."""

    name: str
    size: int
    """Instances that work together; 1 for tasks that each go on their own."""
    tasks: int
    """Tasks that it has to do at a time."""
    seconds: int
    """Of a task."""
    gpus: int = 1
    namespace: str = "default"
    since: int = 0
    ends: list[tuple[int, int]] = field(default_factory=list)
    """When each of its tasks is over, and how many the pool had begun before it."""
    passed: int = 0
    """The most tasks that have begun while one of its own waited."""

    def request(self) -> SlotRequest:
        together = self.size > 1
        more = {"together": together, "begun": [order for _, order in self.ends], "since": self.since}
        working = len(self.ends)
        wanted = working if together and working else self.tasks
        return request(self.name, wanted, working=working, gpus=self.gpus, namespace=self.namespace, **more)


@st.composite
def workers_and_pool(draw):
    pool = Pool(draw(st.integers(4, 8)), draw(st.dictionaries(st.sampled_from("mn"), st.integers(4, 6))))
    workers = []
    for number in range(draw(st.integers(2, 5))):
        size = draw(st.sampled_from([1, 1, 2, 3, 4]))
        tasks, gpus = (size, 1) if size > 1 else (draw(st.integers(1, 8)), draw(st.integers(1, 3)))
        seconds, namespace = draw(st.integers(1, 9)), draw(st.sampled_from("mno"))
        workers.append(Worker(f"job-{number}", size, tasks, seconds, gpus, namespace))
    return workers, pool


@given(workers_and_pool())
@settings(deadline=None)
def test_no_gang_has_a_part_of_its_gpus_and_no_task_waits_for_ever(drawn):
    workers, pool = drawn
    begun, limit = 0, MOST_PASSED + 10 * len(workers) * pool.gpus
    # Where one task of 9 seconds at a time passes all others, each has its turn after so many and the others' turns.
    for now in range(9 * (MOST_PASSED + 4 * len(workers))):
        for each in workers:
            if any(end <= now for end, _ in each.ends) and each.size > 1:
                each.since = begun
            each.ends = [(end, order) for end, order in each.ends if end > now]
        requests = [each.request() for each in workers]
        granted = share(requests, pool, begun)
        assert sum(granted[each.job, each.stage] * each.gpus for each in requests) <= pool.gpus
        for each in workers:
            more = granted[each.name, "generation"] - len(each.ends)
            assert more in (0, each.size) or each.size == 1, "a gang has a part of its GPUs"
            if more:
                each.ends += [(now + each.seconds, begun)] * more
                begun += more
                each.since = begun
            elif len(each.ends) < each.tasks and not (each.ends and each.size > 1):
                each.passed = max(each.passed, begun - each.since)
        assert all(each.passed <= limit for each in workers)
    assert all(each.passed < begun for each in workers), "each had its turn"
