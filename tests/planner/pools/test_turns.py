"""Whose turn it is on which slots."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.pools.turns import MOST_PASSED, SlotUse, WaitingTask, take_turns

TWO_GROUPS = {"learner": ("a", "b"), **{f"actor-{slot}": (slot,) for slot in "abcd"}}


def use(homes: dict[str, tuple[str, ...]], *, awake: tuple[str, ...] = (), **more) -> SlotUse:
    holders: dict[str, str | None] = {slot: None for home in homes.values() for slot in home}
    holders |= {slot: name for name in awake for slot in homes[name]}
    return SlotUse(homes, holders, **more)


def task(number: int, *instances: str, job: str = "job", **more) -> WaitingTask:
    return WaitingTask(number, job, instances, **more)


def test_a_sleeping_instance_wakes_on_a_free_slot():
    assert take_turns([task(1, "actor-a")], use(TWO_GROUPS)).granted == {1: "actor-a"}


def test_one_that_is_awake_without_a_task_is_preferred():
    turns = take_turns([task(1, "actor-a", "actor-b")], use(TWO_GROUPS, awake=("actor-b",), idle=["actor-b"]))
    assert turns.granted == {1: "actor-b"}


def test_the_instance_that_did_a_part_before_comes_first():
    homes = use(TWO_GROUPS, awake=("actor-a", "actor-b"), idle=["actor-a", "actor-b"])
    assert take_turns([task(1, "actor-a", "actor-b", last="actor-b")], homes).granted == {1: "actor-b"}
    waiting = [task(1, "actor-b"), task(2, "actor-a", "actor-b", last="actor-b")]
    assert take_turns(waiting, homes).granted == {1: "actor-b", 2: "actor-a"}, "it does not wait for it"


def test_an_idle_instance_is_put_to_sleep_where_no_free_slot_does():
    turns = take_turns([task(1, "learner")], use(TWO_GROUPS, awake=("actor-a",), idle=["actor-a"]))
    assert (turns.granted, turns.sleeps) == ({}, ["actor-a"])
    turns = take_turns([task(1, "actor-a", "actor-b")], use(TWO_GROUPS, awake=("learner", "actor-c"), idle=["actor-c"]))
    assert (turns.granted, turns.sleeps) == ({}, [])
    turns = take_turns([task(1, "actor-c", "actor-d")], use(TWO_GROUPS, awake=("actor-c",)))
    assert turns.granted == {1: "actor-d"}


def test_who_leaves_already_is_not_told_twice():
    turns = take_turns([task(1, "actor-a")], use(TWO_GROUPS, awake=("learner",), leaving=["learner"]))
    assert (turns.granted, turns.sleeps) == ({}, [])


def test_a_task_whose_slots_are_busy_lets_others_pass():
    """The convoy: another job's generation is on the slot of one job's preparation, while other slots are free."""
    waiting = [task(1, "actor-a", job="first"), task(2, "actor-c", job="other")]
    assert take_turns(waiting, use(TWO_GROUPS, awake=("learner",))).granted == {2: "actor-c"}


def test_a_learner_keeps_the_slots_that_it_can_have_until_it_has_them_all():
    waiting = [task(1, "learner"), task(2, "actor-b"), task(3, "actor-c")]
    assert take_turns(waiting, use(TWO_GROUPS, awake=("actor-a",))).granted == {3: "actor-c"}


def test_a_task_that_is_content_with_spare_slots_comes_last_and_keeps_none():
    waiting = [task(1, "learner", place=2, priority=1, spare=True), task(2, "actor-b"), task(3, "actor-c")]
    assert take_turns(waiting, use(TWO_GROUPS, awake=("actor-a",))).granted == {2: "actor-b", 3: "actor-c"}
    waiting = [task(1, "learner", spare=True, passed=MOST_PASSED), task(2, "actor-a")]
    assert take_turns(waiting, use(TWO_GROUPS)).granted == {2: "actor-a"}
    turns = take_turns(waiting[:1], use(TWO_GROUPS, awake=("actor-a",), idle=["actor-a"]))
    assert turns.sleeps == ["actor-a"], "one without a task does not want its slot"


def test_actors_leave_the_slots_of_their_own_learner_alone_where_they_can():
    homes = use(TWO_GROUPS, jobs=dict.fromkeys(TWO_GROUPS, "job"))
    assert take_turns([task(1, "actor-a", "actor-c")], homes).granted == {1: "actor-c"}


def test_actors_leave_a_group_to_other_jobs_learners_where_they_can():
    homes = {**TWO_GROUPS, "other": ("c", "d")}
    turns = take_turns([task(1, "actor-b", "actor-d")], use(homes, awake=("actor-c",)))
    assert turns.granted == {1: "actor-d"}, "a learner could have a and b, and c is at work"
    turns = take_turns([task(1, "actor-a", "actor-c")], use(homes, jobs={"other": "job"}))
    assert turns.granted == {1: "actor-c"}, "the job's own learner comes after its actors"


def test_actors_leave_the_slots_of_their_own_preparation_alone_where_they_can():
    homes = {**TWO_GROUPS, "preparation": ("c",)}
    jobs = dict.fromkeys(homes, "job")
    assert take_turns([task(1, "actor-c", "actor-d")], use(homes, jobs=jobs)).granted == {1: "actor-d"}


def test_an_instance_is_started_only_where_no_other_can_take_the_task_now():
    homes = {"asleep": ("a",), "idle": ("b",), "fresh": ("c",)}
    known = {"awake": ("idle",), "idle": ["idle"], "unstarted": ["fresh"]}
    assert take_turns([task(1, "fresh", "asleep", "idle")], use(homes, **known)).granted == {1: "idle"}
    assert take_turns([task(1, "fresh", "asleep")], use(homes, **known)).granted == {1: "asleep"}
    turns = take_turns([task(1, "fresh", "asleep")], use({**homes, "asleep": ("b",)}, **known))
    assert (turns.granted, turns.sleeps) == ({}, ["idle"]), "to wake costs less than to start"
    homes |= {"busy": ("a",)}
    assert take_turns([task(1, "asleep", "fresh")], use(homes, awake=("busy",), unstarted=["fresh"])).granted == {
        1: "fresh"
    }


def test_the_higher_priority_comes_first_then_the_job_that_had_less():
    waiting = [task(1, "actor-a", job="low"), task(2, "actor-a", job="high", priority=1)]
    assert take_turns(waiting, use(TWO_GROUPS)).granted == {2: "actor-a"}
    waiting = [task(1, "actor-a", job="one"), task(2, "actor-a", job="other")]
    assert take_turns(waiting, use(TWO_GROUPS)).granted == {1: "actor-a"}
    assert take_turns(waiting, use(TWO_GROUPS, used={"one": 9.0, "other": 1.0})).granted == {2: "actor-a"}


def test_what_is_nearer_to_the_end_of_its_step_comes_first():
    waiting = [task(1, "actor-a", job="one"), task(2, "actor-a", job="other", place=1)]
    assert take_turns(waiting, use(TWO_GROUPS, used={"other": 100.0})).granted == {2: "actor-a"}


def test_the_tasks_of_a_stage_go_together():
    """Or the jobs would all end their generation at the same time, and leave slots free at the same time."""
    waiting = [task(number, *(f"one-{slot}" for slot in "abcd"), job="one") for number in range(4)]
    waiting += [task(number, *(f"other-{slot}" for slot in "abcd"), job="other") for number in range(4, 8)]
    homes = {f"{job}-{slot}": (slot,) for job in ("one", "other") for slot in "abcd"}
    granted = take_turns(waiting, use(homes)).granted
    assert Counter(name.split("-")[0] for name in granted.values()) == {"one": 4}
    granted = take_turns(waiting, use(homes, used={"one": 100.0, "other": 10.0})).granted
    assert Counter(name.split("-")[0] for name in granted.values()) == {"other": 4}


def test_a_task_that_many_have_passed_comes_before_all_of_its_priority():
    patient = task(1, "actor-a", job="greedy", passed=MOST_PASSED)
    fresh, urgent = task(2, "actor-a", job="modest"), task(3, "actor-a", job="urgent", priority=1)
    used = {"greedy": 3.0}
    assert take_turns([patient, fresh], use(TWO_GROUPS, used=used)).granted == {1: "actor-a"}
    assert take_turns([patient, fresh, urgent], use(TWO_GROUPS, used=used)).granted == {3: "actor-a"}


def test_no_instance_wakes_where_another_may_be_awake_unseen():
    assert take_turns([task(1, "actor-a", "actor-b")], use(TWO_GROUPS, closed=["a"])).granted == {1: "actor-b"}


def test_a_task_without_an_instance_where_slots_are_free_is_told():
    waiting = [task(1, "actor-a"), task(2), task(3)]
    busy = use(TWO_GROUPS, awake=("learner", "actor-c"))
    assert take_turns(waiting, busy).lacking == [1], "one slot is free, for one of them"


@dataclass
class PoolInSteps:
    """Jobs on slots, a turn after the other, as a platform carries turns out."""

    homes: dict[str, tuple[str, ...]]
    holders: dict[str, str | None]
    busy: dict[str, int] = field(default_factory=dict)
    """By instance at work, its task."""
    waiting: dict[int, WaitingTask] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    served: list[int] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)

    def awake(self) -> set[str]:
        return {holder for holder in self.holders.values() if holder is not None}

    def turn(self) -> None:
        able = {
            number: WaitingTask(
                number,
                each.job,
                [name for name in each.instances if name not in self.busy and name not in self.leaving],
                each.priority,
                each.place,
                each.passed,
            )
            for number, each in self.waiting.items()
        }
        before = set(self.busy)
        for name in self.busy:
            self.used[name.split("-")[0]] += len(self.homes[name])
        idle = self.awake() - before - self.leaving
        turns = take_turns(
            list(able.values()), SlotUse(self.homes, self.holders, {}, idle, self.leaving, (), self.used)
        )
        assert set(turns.sleeps) <= idle, "no instance at work is disturbed"
        assert len(turns.sleeps) == len(set(turns.sleeps))
        self.leaving |= set(turns.sleeps)
        for number, name in turns.granted.items():
            assert name in able[number].instances
            for slot in self.homes[name]:
                assert self.holders[slot] in (None, name), "never two awake on a slot"
                self.holders[slot] = name
            self.busy[name] = number
            self.served.append(number)
            passer = self.waiting.pop(number)
            for each in self.waiting.values():
                if each.number < number and each.priority == passer.priority:
                    passed = each.passed + 1
                    self.waiting[each.number] = WaitingTask(*self._of(each), passed)
        assert before <= set(self.busy)

    @staticmethod
    def _of(each: WaitingTask):
        return each.number, each.job, each.instances, each.priority, each.place

    def fall_asleep(self, name: str) -> None:
        self.leaving.discard(name)
        self.holders |= {slot: None for slot in self.homes[name] if self.holders[slot] == name}


@st.composite
def pools(draw) -> PoolInSteps:
    groups, together = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    slots = [[f"s{group}{index}" for index in range(together)] for group in range(groups)]
    homes: dict[str, tuple[str, ...]] = {}
    for job in range(draw(st.integers(1, 3))):
        for kind, most in (("actor", groups * together), ("prep", 2), ("learner", 1)):
            for number in range(draw(st.integers(1, most))):
                group = draw(st.sampled_from(slots))
                count = draw(st.integers(1, together)) if kind == "learner" else 1
                start = draw(st.integers(0, together - count))
                homes[f"j{job}-{kind}-{number}"] = tuple(group[start : start + count])
    return PoolInSteps(homes, {slot: None for group in slots for slot in group})


@settings(deadline=None)
@given(pool=pools(), data=st.data())
def test_every_task_gets_its_turn_and_no_slot_has_two(pool: PoolInSteps, data: st.DataObject) -> None:
    kinds = sorted({name.rsplit("-", 1)[0] for name in pool.homes})
    number = 0
    for _ in range(data.draw(st.integers(1, 30))):
        for _ in range(data.draw(st.integers(0, 3))):
            kind = data.draw(st.sampled_from(kinds))
            instances = [name for name in pool.homes if name.rsplit("-", 1)[0] == kind]
            number += 1
            priority = data.draw(st.integers(0, 1))
            place = ("actor", "prep", "learner").index(kind.split("-")[1])
            pool.waiting[number] = WaitingTask(number, kind.split("-")[0], instances, priority, place)
        pool.turn()
        if pool.busy and data.draw(st.booleans()):
            del pool.busy[data.draw(st.sampled_from(sorted(pool.busy)))]
        if pool.leaving and data.draw(st.booleans()):
            pool.fall_asleep(data.draw(st.sampled_from(sorted(pool.leaving))))
    for _ in range(3 * number + 3):
        pool.turn()
        for name in [*pool.leaving]:
            pool.fall_asleep(name)
        pool.turn()
        pool.busy.clear()
    assert not pool.waiting
    assert sorted(pool.served) == list(range(1, number + 1))


@pytest.mark.parametrize("learner", [("a",), ("a", "b")])
def test_no_task_waits_for_ever_however_many_come_after(learner: tuple[str, ...]) -> None:
    """A job whose other tasks never leave it without slots, and one whose short tasks always come with none."""
    homes = {"greedy-learner": learner, "greedy-actor": ("c",), "modest-1": ("a",), "modest-2": ("b",)}
    pool = PoolInSteps(homes, dict.fromkeys("abc"))
    pool.waiting[0] = WaitingTask(0, "greedy", ["greedy-actor"])
    pool.turn()
    pool.waiting[1] = WaitingTask(1, "greedy", ["greedy-learner"])
    for number in range(2, 2 + 8 * MOST_PASSED):
        if 1 in pool.served:
            return
        pool.waiting[number] = WaitingTask(number, "modest", ["modest-1", "modest-2"])
        pool.turn()
        # One ends after the other, while the next waits: the actor of the greedy job works on.
        if number % 2 and (modest := [name for name in pool.busy if name.startswith("modest")]):
            del pool.busy[modest[0]]
        for name in [*pool.leaving]:
            pool.fall_asleep(name)
    raise AssertionError("it waited for ever")
