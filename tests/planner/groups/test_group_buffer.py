"""Which groups a step takes: for any order of events none is lost, taken twice, or staler than its rule allows."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.groups.group_buffer import GroupBuffer, GroupName, ReadyGroup, TooStale
from rlhfless_operator.planner.groups.staleness import last_step_begun, staleness


class Job:
    """A buffer between a generator and a learner that take turns in any order."""

    def __init__(self, size: int, most: int, rule: TooStale, steps: int, prompts: int, least: int = 0) -> None:
        self.buffer = GroupBuffer(size, most, rule, least=least)
        self.size, self.most, self.steps, self.prompts = size, most, steps, prompts
        self.under_way: list[ReadyGroup] = []
        self.again: list[int] = []
        self.drawn: list[int] = []
        self.taken: list[tuple[int, ReadyGroup, float]] = []
        self.dropped: list[ReadyGroup] = []
        self.rollout = self.done = self.held = 0

    def begin(self) -> bool:
        """The next rollout, if admission allows it and any groups are wanted."""
        wanted = min(self.size, self.steps * self.size - self.buffer.live)
        if not wanted or not self.buffer.admits(wanted, self.done, self.most):
            return False
        self.rollout += 1
        again, self.again = self.again[:wanted], self.again[wanted:]
        fresh = [(len(self.drawn) + place) % self.prompts for place in range(wanted - len(again))]
        self.drawn += fresh
        chosen = [*again, *fresh]
        if len(set(chosen)) < len(chosen):
            # A real cursor defers such a prompt.
            chosen = [*again, *(prompt + 1000 * self.rollout for prompt in fresh)]
            self.drawn[len(self.drawn) - len(fresh) :] = chosen[len(again) :]
        self.buffer.begin(self.rollout, chosen, self.done)
        self.under_way += [ReadyGroup(GroupName(self.rollout, each), self.done, "part") for each in chosen]
        return True

    def complete(self, place: int, newer: int = 0) -> bool:
        """Any group under way, some of whose tokens may be newer than its rollout."""
        if not self.under_way:
            return False
        group = self.under_way.pop(place % len(self.under_way))
        group = ReadyGroup(group.name, min(self.done, group.version + newer), group.part)
        self.buffer.complete(group)
        self.drop()
        return True

    def learn(self) -> bool:
        step = self.done + 1
        chosen = self.buffer.choose(step, self.held) if step <= self.steps else []
        if not chosen:
            return False
        assert len(chosen) >= min(self.buffer.least or self.size, self.size - self.held)
        self.buffer.taken(each.group.name for each in chosen)
        self.taken += [(step, each.group, each.factor) for each in chosen]
        self.held += len(chosen)
        if self.held == self.size:
            self.done, self.held = step, 0
        self.drop()
        return True

    def drop(self) -> None:
        names = self.buffer.drop(self.done + 1)
        self.again += [name.prompt for name in names]
        self.dropped += [ReadyGroup(name, 0, "") for name in names]

    def finish(self) -> None:
        """Let everything happen that still can."""
        while self.learn() or self.begin() or self.complete(0):
            pass


EVENTS = st.lists(
    st.one_of(
        st.just(("begin", 0, 0)),
        st.tuples(st.just("complete"), st.integers(0, 40), st.integers(0, 2)),
        st.just(("learn", 0, 0)),
    ),
    max_size=150,
)
RULES: list[TooStale] = ["wait", "drop", "downweight"]


@pytest.mark.parametrize("rule", RULES)
@given(size=st.integers(1, 4), most=st.integers(1, 4), least=st.integers(0, 3), switches=st.booleans(), events=EVENTS)
def test_every_step_has_its_groups_and_every_prompt_is_learnt_from(
    rule: TooStale, size: int, most: int, least: int, switches: bool, events: list[tuple[str, int, int]]
) -> None:
    job = Job(size, most, rule, steps=8, prompts=9, least=least)
    for kind, place, newer in events:
        if kind == "begin":
            job.begin()
        elif kind == "complete":
            job.complete(place, newer if switches else 0)
        else:
            job.learn()
    job.finish()
    assert job.done == 8, "no order of events stops the job"
    names = [group.name for _, group, _ in job.taken]
    assert len(set(names)) == len(names) == 8 * size, "none is taken twice"
    assert not set(names) & {group.name for group in job.dropped}
    assert set(Counter(step for step, _, _ in job.taken).values()) == {size}
    assert Counter(name.prompt for name in names) == Counter(job.drawn), "no prompt is lost"
    for step, group, factor in job.taken:
        stale = staleness(step, group.version)
        assert stale >= 0
        assert stale <= most or rule == "downweight"
        assert factor == (1.0 if stale <= most else (1 + most) / (1 + stale))
    assert rule == "drop" or not job.dropped


@given(size=st.integers(1, 4), most=st.integers(1, 8), done=st.integers(0, 9), rollouts=st.integers(0, 20))
def test_without_drops_as_many_rollouts_begin_as_steps_may(size: int, most: int, done: int, rollouts: int) -> None:
    buffer = GroupBuffer(size, most)
    for rollout in range(1, rollouts + 1):
        buffer.begin(rollout, range(size), 0)
    assert buffer.admits(size, done, most) == (rollouts + 1 <= last_step_begun(done, most))


def ready(rollout: int, prompt: int, version: int) -> ReadyGroup:
    return ReadyGroup(GroupName(rollout, prompt), version, f"part-{rollout}")


def test_a_group_that_takes_long_does_not_hold_up_the_learner_until_it_must() -> None:
    buffer = GroupBuffer(2, most=2)
    for rollout in (1, 2, 3):
        buffer.begin(rollout, [0, 1], version=0)
    for rollout, prompt in [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]:
        buffer.complete(ready(rollout, prompt, 0))
    for step, expected in [(1, [(1, 0), (2, 0)]), (2, [(2, 1), (3, 0)])]:
        chosen = buffer.choose(step)
        names = [each.group.name for each in chosen]
        assert [(name.rollout, name.prompt) for name in names] == expected
        buffer.taken(names)
    buffer.begin(4, [0, 1], version=1)
    buffer.complete(ready(4, 0, 1))
    assert not buffer.choose(3), "step 3 is the last that may learn from version 0"
    buffer.complete(ready(1, 1, 0))
    chosen = buffer.choose(3)
    assert [(each.group.name.rollout, each.group.version) for each in chosen] == [(1, 0), (3, 0)]


def test_a_step_does_not_take_newer_groups_where_too_many_older_ones_would_be_left_for_the_next() -> None:
    buffer = GroupBuffer(2, most=1)
    for rollout in (1, 2):
        buffer.begin(rollout, [0, 1], version=0)
    buffer.complete(ready(1, 0, 0))
    buffer.complete(ready(2, 0, 0))
    buffer.taken([GroupName(1, 0), GroupName(2, 0)])
    buffer.begin(3, [0, 1], version=1)
    buffer.complete(ready(3, 0, 1))
    buffer.complete(ready(3, 1, 1))
    assert not buffer.choose(2)
    buffer.rule = "downweight"
    assert buffer.choose(2)


def test_a_step_in_pieces_takes_what_is_there_as_far_as_older_groups_keep_their_room() -> None:
    buffer = GroupBuffer(3, most=1, least=1)
    for rollout in (1, 2):
        buffer.begin(rollout, [0, 1, 2], version=0)
    assert not buffer.has_enough()
    for rollout, prompt in [(1, 0), (1, 1), (1, 2)]:
        buffer.complete(ready(rollout, prompt, 0))
    buffer.taken(each.group.name for each in buffer.choose(1))
    buffer.begin(3, [0, 1, 2], version=1)
    for prompt in (0, 1, 2):
        buffer.complete(ready(3, prompt, 1))
    assert not buffer.choose(2), "step 2 is the last that may learn from version 0, whose groups fill it"
    buffer.complete(ready(2, 1, 0))
    assert [each.group.name for each in buffer.choose(2)] == [GroupName(2, 1)]
    buffer.taken([GroupName(2, 1)])
    assert not buffer.choose(2, held=1)
    buffer.rule = "downweight"
    assert [each.group.name for each in buffer.choose(2, held=1)] == [GroupName(3, 0), GroupName(3, 1)]


def test_a_step_waits_for_a_piece_or_for_the_rest_of_its_groups() -> None:
    buffer = GroupBuffer(4, most=1, least=3)
    buffer.begin(1, range(4), version=0)
    buffer.complete(ready(1, 0, 0))
    buffer.complete(ready(1, 1, 0))
    assert not buffer.choose(1)
    assert len(buffer.choose(1, held=2)) == 2
    buffer.complete(ready(1, 2, 0))
    assert len(buffer.choose(1)) == 3


def test_a_driver_that_comes_later_passes_over_what_was_taken() -> None:
    buffer = GroupBuffer(1, most=1)
    buffer.begin(1, [0], version=0)
    buffer.taken([GroupName(1, 0)])
    buffer.complete(ready(1, 0, 0))
    assert not buffer.choose(2)
    assert buffer.live == 1
