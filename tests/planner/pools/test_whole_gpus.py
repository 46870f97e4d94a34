"""Which jobs of a pool have its GPUs where a switch costs something, and that jobs which share lose nothing by it."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.pools.sharing import Pool
from rlhfless_operator.planner.pools.whole_gpus import (
    TURN_SWITCHES,
    Contender,
    SwitchCost,
    keeps_any,
    next_turns,
    turn_seconds,
)

TURN = TURN_SWITCHES * 10.0


def job(name: str, gpus: int = 4, *, since: float = 0.0, **more) -> Contender:
    options = {"namespace": "default", "switch_seconds": 10.0, "keeps": True, **more}
    return Contender(job=name, gpus=gpus, since=since, **options)


def having(name: str, gpus: int = 4, **more) -> Contender:
    return job(name, gpus, has_turn=True, **more)


def test_a_job_keeps_what_it_needs_again_before_its_gpu_could_go_to_another_one_and_back():
    assert SwitchCost(10.0, 19.0).keeps
    assert SwitchCost(10.0, 21.0).keeps is False
    assert SwitchCost(10.0).keeps is None
    assert SwitchCost(0.0).keeps is False
    assert keeps_any([SwitchCost(10.0, 21.0), SwitchCost(10.0)]) is None
    assert keeps_any([SwitchCost(10.0, 9.0), SwitchCost(10.0)])
    assert keeps_any([SwitchCost(10.0, 21.0), SwitchCost(0.0)]) is False


def test_with_cheap_switches_all_have_their_turn():
    assert next_turns([job("a", keeps=False), job("b", keeps=False)], Pool(4), 0.0) == {"a", "b"}


def test_one_job_shows_whether_switches_are_cheap():
    unknown = [job("a", keeps=None), job("b", since=1.0, keeps=None)]
    assert next_turns(unknown, Pool(4), 1.0) == {"a"}
    assert next_turns([having("a", keeps=False), unknown[1]], Pool(4), 1.0) == {"a", "b"}


def test_jobs_that_fit_beside_each_other_all_have_their_turn():
    assert next_turns([job("a"), job("b"), job("c")], Pool(12), 0.0) == {"a", "b", "c"}


def test_a_job_has_its_turn_with_all_that_it_works_with_or_not_at_all():
    assert next_turns([having("a", 3), job("b", 3)], Pool(4), TURN / 2) == {"a"}


def test_a_turn_lasts_many_times_as_long_as_a_switch():
    contenders = [having("a"), job("b", since=1.0)]
    assert turn_seconds(contenders) == TURN
    assert next_turns(contenders, Pool(4), TURN - 0.1) == {"a"}
    assert next_turns(contenders, Pool(4), TURN) == {"b"}


def test_a_turn_goes_on_while_nobody_waits():
    assert next_turns([having("a"), having("b")], Pool(8), 100 * TURN) == {"a", "b"}


def test_the_one_that_has_waited_longest_is_next_and_nobody_goes_past_it():
    contenders = [having("a", 2), job("b", 4, since=1.0), job("c", 2, since=2.0)]
    assert next_turns(contenders, Pool(4), 10.0) == {"a"}
    assert next_turns(contenders, Pool(4), TURN) == {"b"}


def test_no_more_jobs_give_way_than_have_to():
    contenders = [having("a", 2), having("b", 2, since=1.0), job("c", 2, since=2.0)]
    assert next_turns(contenders, Pool(4), 2 * TURN) == {"b", "c"}
    large = [having("a", 1), having("b", 3, since=1.0), job("c", 3, since=2.0)]
    assert next_turns(large, Pool(4), 2 * TURN) == {"a", "c"}


def test_turns_that_are_over_go_on_until_there_is_room_for_the_one_that_waits():
    contenders = [having("a", 2), having("b", 2, since=TURN), job("c", 4, since=1.0)]
    assert next_turns(contenders, Pool(4), TURN + 1) == {"a", "b"}
    assert next_turns(contenders, Pool(4), 2 * TURN) == {"c"}


def test_a_higher_priority_has_its_turn_at_once_and_a_lower_one_waits_for_it():
    assert next_turns([having("a"), job("b", since=1.0, priority=1)], Pool(4), 1.0) == {"b"}
    assert next_turns([having("a", priority=1), job("b", since=1.0)], Pool(4), 100 * TURN) == {"a"}


def test_a_namespace_at_its_quota_holds_nobody_up():
    pool = Pool(8, {"small": 4})
    contenders = [having("a", namespace="small"), job("b", since=1.0, namespace="small"), job("c", since=2.0)]
    assert next_turns(contenders, pool, 10.0) == {"a", "c"}
    assert next_turns(contenders, pool, TURN) == {"b", "c"}


def test_a_job_that_has_come_to_need_more_waits_if_it_came_later():
    contenders = [having("a", 2), having("b", 3, since=1.0)]
    assert next_turns(contenders, Pool(4), 2.0) == {"a"}


# --- the guarantees, on jobs that work for as long as they are drawn ---


@dataclass
class Drawn:
    """A job as it goes through its turns."""

    name: str
    gpus: int
    work: float
    start: float
    drain: float
    since: float = 0.0
    has_turn: bool = False
    ready: float = math.inf
    """When its instances can work, in its turn."""
    longest_wait: float = 0.0
    displaced: int = 0

    @property
    def alone(self) -> float:
        return self.start + self.work + self.drain

    def contends(self) -> Contender:
        switch = self.start + self.drain
        return job(self.name, self.gpus, since=self.since, has_turn=self.has_turn, switch_seconds=switch)


def share_out(jobs: list[Drawn], pool: Pool) -> float:
    """Seconds to the end of all, by `next_turns`: a GPU is free again when its instance has drained."""
    now, draining = 0.0, []
    todo = list(jobs)
    while todo:
        contenders = [each.contends() for each in todo]
        turns = next_turns(contenders, pool, now)
        assert turns, "GPUs are left without work"
        for each in todo:
            if each.has_turn and each.name not in turns:
                if each.ready < math.inf:
                    draining.append((now + each.drain, each.gpus))
                each.has_turn, each.since, each.ready = False, now, math.inf
                each.displaced += 1
            elif not each.has_turn and each.name in turns:
                each.longest_wait = max(each.longest_wait, now - each.since)
                each.has_turn, each.since = True, now
        draining = [entry for entry in draining if entry[0] > now]
        free = pool.gpus - sum(gpus for _, gpus in draining)
        free -= sum(each.gpus for each in todo if each.ready < math.inf)
        assert free >= 0
        for each in todo:
            if each.has_turn and each.ready == math.inf and each.gpus <= free:
                each.ready, free = now + each.start, free - each.gpus
        over = [each.since + turn_seconds(contenders) for each in todo if each.has_turn]
        ends = [max(now, each.ready) + each.work for each in todo if each.ready < math.inf]
        later = min(time for time in [*ends, *(entry[0] for entry in draining), *over] if time > now)
        for each in todo:
            each.work -= max(0.0, later - max(now, each.ready))
        now = later
        for each in [each for each in todo if each.ready < math.inf and each.work <= 1e-6]:
            todo.remove(each)
            draining.append((now + each.drain, each.gpus))
    return max([now, *(entry[0] for entry in draining)])


SECONDS = st.floats(0.1, 100.0)
JOBS = st.lists(st.tuples(st.integers(1, 4), st.floats(1.0, 50_000.0), SECONDS, SECONDS), min_size=1, max_size=5).map(
    lambda drawn: [Drawn(f"job-{number}", *each) for number, each in enumerate(drawn)]
)


@given(JOBS, st.integers(4, 9))
def test_jobs_that_share_are_never_slower_than_one_after_the_other(jobs, gpus):
    alone = sum(each.alone for each in jobs)
    seconds = share_out(jobs, Pool(gpus))
    assert seconds <= alone * (1 + 1 / (TURN_SWITCHES - 1)) + 1e-3
    if not any(each.displaced for each in jobs):
        assert seconds <= alone + 1e-3


@given(JOBS, st.integers(4, 9))
def test_no_job_waits_for_longer_than_the_others_turns(jobs, gpus):
    switch = max(each.start + each.drain for each in jobs)
    share_out(jobs, Pool(gpus))
    for each in jobs:
        assert each.longest_wait <= (len(jobs) - 1) * (TURN_SWITCHES + 1) * switch + 1e-3


@st.composite
def contenders_and_pool(draw):
    pool = Pool(draw(st.integers(4, 9)), draw(st.dictionaries(st.sampled_from("mn"), st.integers(4, 6))))
    drawn = [
        job(
            f"job-{number}",
            draw(st.integers(1, 4)),
            since=draw(st.floats(0, 2000)),
            namespace=draw(st.sampled_from("mno")),
            priority=draw(st.integers(0, 2)),
            keeps=draw(st.sampled_from([True, False, None])),
        )
        for number in range(draw(st.integers(1, 6)))
    ]
    had = next_turns(drawn[: draw(st.integers(0, len(drawn)))], pool, 2000.0)
    return [replace(each, has_turn=each.job in had) for each in drawn], pool, draw(st.floats(2000, 4000))


@given(contenders_and_pool())
def test_turns_stay_within_pool_and_quotas_and_go_to_the_highest_priority(drawn):
    contenders, pool, now = drawn
    turns = next_turns(contenders, pool, now)
    known = [each.keeps for each in contenders if each.keeps is not None]
    if known and not any(known):
        assert turns == {each.job for each in contenders}
        return
    chosen = [each for each in contenders if each.job in turns]
    assert sum(each.gpus for each in chosen) <= pool.gpus
    for name, quota in pool.namespaces.items():
        assert sum(each.gpus for each in chosen if each.namespace == name) <= quota
    assert max(each.priority for each in contenders) == max(each.priority for each in chosen)
    assert next_turns(contenders[::-1], pool, now) == turns


@pytest.mark.parametrize("count", [1, 2, 3])
def test_decisions_hold_until_something_changes(count):
    contenders = [job(f"job-{number}", 2, since=float(number)) for number in range(count)]
    turns = next_turns(contenders, Pool(4), 10.0)
    after = [replace(each, has_turn=each.job in turns, since=10.0) for each in contenders]
    assert next_turns(after, Pool(4), 11.0) == turns
