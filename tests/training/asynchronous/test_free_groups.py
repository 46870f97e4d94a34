"""Groups that go on their own, over several drivers: in any order of events none is lost, taken twice, or collected."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from rlhfless_functions.api import ExampleSample, GroupResult, PrepareResult, SampledTokens, WeightsReference
from rlhfless_operator.planner.groups.group_buffer import GroupName, TooStale
from rlhfless_operator.planner.groups.staleness import staleness
from rlhfless_operator.training.asynchronous.free_groups import FreeGroups, names_of
from rlhfless_operator.training.data.cursor import DataCursor
from rlhfless_operator.training.journal.async_journal import (
    BegunRollout,
    TakenPiece,
    TakenStep,
    chosen_piece,
    step_of_pieces,
)


class Job:
    """What is written down of a job, and the groups as its present driver has them."""

    def __init__(
        self, size: int, most: int, rule: TooStale, *, steps: int, prompts: int, every: int = 3, least: int = 0
    ) -> None:
        self.size, self.most, self.rule, self.steps, self.every = size, most, rule, steps, every
        self.begun: list[BegunRollout] = []
        self.prepared: list[GroupName] = []
        self.taken: list[TakenStep] = []
        self.pieces: list[TakenPiece] = []
        """Of the step after those."""
        self.done = self.checkpoint = 0
        self.position: dict[str, Any] | None = None
        self.told = 0
        """Dropped groups, by the records of the steps that are done."""
        self.needs = {"rollout": 1, "batch": 1, "version": 0, "last": 10**6}
        self.cursor = DataCursor(prompts, 0, shuffle=True)
        self.least = least
        self.groups = FreeGroups(size, most, rule, 0, least=least)

    def begin(self) -> bool:
        """The next rollout, if admission allows it."""
        buffer = self.groups.buffer
        wanted = min(self.size, self.steps * self.size - buffer.live)
        if wanted <= 0 or not buffer.admits(wanted, self.done, self.most):
            return False
        again, others = self.groups.next_rollout(self.steps * self.size)
        prompts = [name.prompt for name in again]
        prompts += self.cursor.draw(others, taken=prompts)
        policy = WeightsReference(version=self.done, uri="weights")
        number = self.groups.last + 1
        begun = BegunRollout(step=number, policy=policy, prompts=prompts, again=again, cursor=self.cursor.state())
        self.begun.append(begun)
        self.groups.begin(begun)
        return True

    def under_way(self) -> list[GroupName]:
        """Groups of the rollouts that this driver makes, and that no driver has prepared."""
        names = [GroupName(number, row) for number, each in self.groups.rollouts.items() for row in each.prompts or []]
        return [name for name in names if name not in self.prepared]

    def prepare(self, place: int) -> bool:
        """Any group that is under way; a rollout is complete with its last one."""
        names = self.under_way()
        if not names:
            return False
        name = names[place % len(names)]
        assert self.needs["rollout"] <= name.rollout
        assert self.needs["version"] <= self.begun[name.rollout - 1].policy.version
        self.prepared.append(name)
        self._tell(name)
        if not any(other.rollout == name.rollout for other in self.under_way()):
            self.groups.measured.add(name.rollout)
        return True

    def take(self) -> bool:
        """A step takes groups. It is not learnt yet."""
        step = self.done + 1
        if len(self.taken) == step or step > self.steps:
            return False
        chosen = self.groups.choose(step, sum(len(piece.groups) for piece in self.pieces))
        if not chosen:
            return False
        self.pieces.append(chosen_piece(chosen, 1))
        self.groups.take(step, self.pieces[-1].groups)
        if sum(len(piece.groups) for piece in self.pieces) == self.size:
            self.taken.append(step_of_pieces(step, self.pieces, at_once=not self.least))
            self.groups.remember(self.taken[-1])
            self.pieces = []
        return True

    def learn(self, begins: int = 0) -> bool:
        """The step that has its groups is done. So many rollouts begin after its record is made, and before that is
        written down."""
        if len(self.taken) == self.done:
            return False
        self.told += self.groups.count_dropped()
        for _ in range(begins):
            self.begin()
        self.done += 1
        assert [each.result.prompt for each in self.groups.learnt(self.taken[-1])] == [
            name.prompt for name in names_of(self.taken[-1])
        ]
        self.needs = self.groups.needs(self.done, self.checkpoint + 1, self.groups.last)
        self.position = {"groups": self.groups.state(self.done), "cursor": self.cursor.state()}
        if self.done % self.every == 0:
            self.checkpoint = self.done
        self.groups.finish(self.done)
        again = [name for taken in self.taken[self.checkpoint :] for name in names_of(taken)]
        assert all(self.needs["batch"] <= name.rollout <= self.needs["last"] for name in again)
        return True

    def restart(self) -> bool:
        """Another driver comes, which has what is written down."""
        self.groups = FreeGroups(self.size, self.most, self.rule, self.done, least=self.least)
        if self.position is not None:
            self.groups.restore(self.position["groups"])
            self.cursor = self.cursor.restored(self.position["cursor"])
        for begun in self.begun[self.groups.last :]:
            self.cursor = self.cursor.restored(begun.cursor)
            self.groups.begin(begun)
        for name in self.prepared:
            if name.rollout in self.groups.rollouts:
                self._tell(name)
        for taken in self.taken[self.checkpoint :]:
            self.groups.remember(taken)
            if taken.step > self.done:
                self.groups.take(taken.step, taken.groups)
        for piece in self.pieces:
            self.groups.take(len(self.taken) + 1, piece.groups)
        for number in self.groups.rollouts:
            if not any(name.rollout == number for name in self.under_way()):
                self.groups.measured.add(number)
        return True

    def go_on(self, late: int) -> bool:
        """A step, while the earliest groups under way are not prepared."""
        while self.begin():
            pass
        while len(self.under_way()) > late:
            self.prepare(-1)
        while self.take():
            pass
        return self.learn()

    def finish(self) -> None:
        """Let everything happen that still can."""
        while self.learn() or self.take() or self.begin() or self.prepare(0):
            pass

    def _tell(self, name: GroupName) -> None:
        result = GroupResult(prompt=name.prompt, reward=1.0, spread=0.5)
        part = f"part-{name.rollout}"
        self.groups.prepared(name.rollout, PrepareResult(part=part, groups=[result], metrics={}))


EVENTS = st.lists(
    st.one_of(
        st.sampled_from([("begin", 0), ("take", 0), ("restart", 0)]),
        st.tuples(st.just("learn"), st.integers(0, 1)),
        st.tuples(st.just("prepare"), st.integers(0, 40)),
        st.tuples(st.just("go_on"), st.integers(0, 4)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("rule", ["wait", "drop", "downweight"])
@settings(deadline=None)
@example(size=2, most=1, more=0, least=0, events=[*[("go_on", 1)] * 2, ("prepare", 0), *[("go_on", 1)] * 2])
@example(size=2, most=1, more=0, least=0, events=[*[("go_on", 1)] * 2, ("prepare", 0), ("go_on", 1), ("restart", 0)])
@example(size=3, most=1, more=0, least=1, events=[*[("go_on", 1)] * 2, ("prepare", 0), ("take", 0), ("restart", 0)])
@given(size=st.integers(1, 4), most=st.integers(1, 3), more=st.integers(0, 5), least=st.integers(0, 2), events=EVENTS)
def test_whenever_a_driver_comes_no_group_is_lost_taken_twice_or_collected(
    rule: TooStale, size: int, most: int, more: int, least: int, events: list[tuple[str, int]]
) -> None:
    job = Job(size, most, rule, steps=8, prompts=size + more, least=least)
    for kind, place in events:
        if kind in ("prepare", "go_on", "learn"):
            getattr(job, kind)(place)
        else:
            getattr(job, kind)()
    job.finish()
    assert job.done == 8, "no order of events stops the job"
    names = [name for taken in job.taken for name in names_of(taken)]
    again = [name for begun in job.begun for name in begun.again]
    event("some are dropped" if again else "none is dropped")
    drawn = [GroupName(begun.step, prompt) for begun in job.begun for prompt in begun.prompts or []]
    assert len(set(names)) == len(names) == 8 * size, "none is taken twice"
    assert sorted([*names, *again]) == sorted(drawn), "each is learnt from, or generated anew"
    assert not again or rule == "drop"
    assert job.told == len(again), "each is counted once"
    expected = DataCursor(size + more, 0, shuffle=True).draw(size + more)
    fresh = Counter(prompt for begun in job.begun for prompt in (begun.prompts or [])[len(begun.again) :])
    assert fresh.total() == 8 * size
    # A prompt that is generated anew in a rollout is drawn for a later one.
    handed_out = fresh + Counter(job.cursor.state()["deferred"])
    counts = [handed_out[prompt] for prompt in expected]
    assert max(counts) - min(counts) <= 1, "each epoch has every prompt once"
    for taken in job.taken:
        for group in taken.groups:
            assert staleness(taken.step, group.version) <= most or rule == "downweight"


def begun(number: int, prompts: list[int], version: int = 0) -> BegunRollout:
    return BegunRollout(step=number, policy=WeightsReference(version=version, uri="w"), prompts=prompts)


def prepare(groups: FreeGroups, rollout: int, prompts: list[int]) -> None:
    results = [GroupResult(prompt=each, reward=1.0, spread=0.5) for each in prompts]
    groups.prepared(rollout, PrepareResult(part="part", groups=results, metrics={}))


def test_a_prompt_that_was_dropped_twice_is_generated_twice_more() -> None:
    groups = FreeGroups(2, 1, "drop", done=2)
    groups.begin(begun(1, [0, 1]))
    groups.begin(begun(2, [0, 1]))
    prepare(groups, 1, [0])
    prepare(groups, 2, [0])
    assert groups.drop(3) == 2
    # Four groups were learnt from, two are under way, and two are dropped.
    assert groups.next_rollout(8) == ([GroupName(1, 0)], 0), "no other prompt has its place"
    groups.begin(begun(3, [0], version=2).model_copy(update={"again": [GroupName(1, 0)]}))
    assert groups.next_rollout(8) == ([GroupName(2, 0)], 0)
    assert groups.next_rollout(9) == ([GroupName(2, 0)], 1)


def test_the_oldest_token_of_a_group_counts() -> None:
    groups = FreeGroups(1, 2, "wait", done=0)
    groups.begin(begun(1, [7]))
    sampled = [SampledTokens(version=1, tokens=3), SampledTokens(version=2, tokens=1)]
    result = GroupResult(prompt=7, reward=1.0, spread=0.5, sampled=sampled)
    groups.prepared(1, PrepareResult(part="part", groups=[result], metrics={}))
    chosen = groups.choose(1)
    assert [each.group.version for each in chosen] == [1]


def test_what_a_group_came_to_is_known_until_its_step_is_done_and_then_forgotten() -> None:
    groups = FreeGroups(1, 1, "wait", done=0)
    groups.begin(begun(1, [7]))
    example, other = (
        ExampleSample(row=row, prompt="p", response="r", reward=1.0, tokens=1, finish_reason="stop") for row in (7, 8)
    )
    result = GroupResult(prompt=7, reward=0.25, spread=0.5)
    groups.prepared(1, PrepareResult(part="part", groups=[result], examples=[example, other], metrics={}))
    groups.measured.add(1)
    chosen = groups.choose(1)
    taken = step_of_pieces(1, [chosen_piece(chosen, 1)], at_once=True)
    groups.take(1, taken.groups)
    groups.finish(0)
    (found,) = groups.learnt(taken)
    assert (found.result.reward, found.examples) == (0.25, [example])
    groups.finish(1)
    assert groups.learnt(taken) == []
    assert not groups.rollouts


def test_dropped_groups_are_counted_once() -> None:
    groups = FreeGroups(1, 1, "drop", done=2)
    groups.begin(begun(1, [0]))
    prepare(groups, 1, [0])
    assert groups.drop(2) == 0
    assert groups.drop(3) == groups.drop(3) == 1
    assert groups.count_dropped() == 0, "that is not written down yet"
    again = begun(2, [0], version=2).model_copy(update={"again": [GroupName(1, 0)]})
    groups.begin(again)
    assert (groups.count_dropped(), groups.count_dropped()) == (1, 0)


def test_a_later_driver_counts_the_dropped_groups_that_no_record_tells_of() -> None:
    def dropped() -> FreeGroups:
        """Group 0 of the first rollout is dropped, and the second one makes it anew."""
        groups = FreeGroups(1, 1, "drop", done=2)
        groups.begin(begun(1, [0]))
        prepare(groups, 1, [0])
        groups.drop(3)
        groups.begin(begun(2, [0], version=2).model_copy(update={"again": [GroupName(1, 0)]}))
        return groups

    def later(groups: FreeGroups) -> FreeGroups:
        found = FreeGroups(1, 1, "drop", done=2)
        found.restore(groups.state(2))
        return found

    assert later(dropped()).count_dropped() == 1, "it began before the step's record, which did not count it"
    told = dropped()
    told.count_dropped()
    assert later(told).count_dropped() == 0


def test_what_is_needed_are_groups_that_are_left_steps_since_the_checkpoint_and_weights_that_sample() -> None:
    groups = FreeGroups(2, 2, "wait", done=0)
    for number, version in [(1, 0), (2, 0), (3, 1), (4, 2)]:
        groups.begin(begun(number, [0, 1], version))
    prepare(groups, 1, [0])
    prepare(groups, 2, [0, 1])
    prepare(groups, 3, [0])
    groups.measured.add(2)

    def take(step: int, *names: tuple[int, int]) -> None:
        parts = [{"prompt": prompt, "version": 0, "rollout": rollout} for rollout, prompt in names]
        batch = {"step": step, "parts": ["part"], "samples": [{"prompt": 0, "index": 0}]}
        taken = TakenStep.model_validate({"step": step, "base": step - 1, "groups": parts, "batch": batch})
        groups.take(step, taken.groups)
        groups.remember(taken)

    take(1, (1, 0), (2, 0))
    assert groups.needs(1, 1, last=4) == {"rollout": 1, "last": 4, "batch": 1, "version": 0}
    prepare(groups, 1, [1])
    groups.measured.add(1)
    take(2, (1, 1), (2, 1))
    assert groups.needs(1, 1, last=5) == {"rollout": 1, "last": 5, "batch": 1, "version": 0}, "step 2 is not done"
    assert groups.needs(2, 1, last=5) == {"rollout": 3, "last": 5, "batch": 1, "version": 1}, "a learner replays both"
    assert groups.needs(2, 3, last=5) == {"rollout": 3, "last": 5, "batch": 3, "version": 1}
