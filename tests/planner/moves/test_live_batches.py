"""Groups join live batches: no sample changes its version, no batch is empty beside a group, few hold the last ones."""

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.moves.live_batches import Batch, Empty, Give, WaitingGroup, deal

PLACES = 8
batches = st.lists(
    st.builds(
        lambda version, samples, less: Batch(version, samples, max(0, PLACES - samples - less)),
        st.integers(0, 3),
        st.integers(0, PLACES),
        st.integers(0, 3),
    ),
    max_size=6,
)
groups = st.lists(st.builds(WaitingGroup, st.integers(0, 3), st.integers(1, 4)), max_size=8).map(
    lambda found: sorted(found, key=lambda group: group.version)
)


@dataclass
class Model:
    """Batches as commands change them."""

    samples: list[Counter[int]]
    """Samples of each version in every batch."""

    def apply(self, commands: list[Give | Empty], waiting: list[WaitingGroup]) -> list[WaitingGroup]:
        """Carry commands out; return the samples that then wait."""
        given, back = set(), []
        for command in commands:
            if isinstance(command, Empty):
                back += [
                    WaitingGroup(version, 1)
                    for version, count in self.samples[command.batch].items()
                    for _ in range(count)
                ]
                self.samples[command.batch] = Counter()
            else:
                assert command.group not in given, "given twice"
                given.add(command.group)
                group, batch = waiting[command.group], self.samples[command.batch]
                assert not [version for version in batch if version != group.version], "a batch has one version"
                batch[group.version] += group.samples
        rest = back + [group for index, group in enumerate(waiting) if index not in given]
        return sorted(rest, key=lambda group: group.version)


@given(batches, groups, st.booleans(), st.booleans())
def test_a_batch_has_samples_of_one_version_and_is_not_empty_while_a_group_waits(
    held: list[Batch], waiting: list[WaitingGroup], may_open: bool, gathers: bool
) -> None:
    commands = deal(held, waiting, may_open=may_open, gathers=gathers)
    model = Model([Counter({each.version: each.samples} if each.samples else {}) for each in held])
    model.apply(commands, waiting)
    left = len(waiting) - sum(isinstance(command, Give) for command in commands)
    if left:
        assert all(model.samples), "an empty batch takes any group"
    if may_open and left:
        assert not [command for command in commands if isinstance(command, Empty)], "another actor opens instead"


@settings(max_examples=500)
@given(batches, groups.flatmap(st.permutations), st.booleans())
@example([Batch(1, 3, 5), Batch(1, 1, 7)], [WaitingGroup(1, 1)], True)
@example([Batch(3, 6, 1)], [WaitingGroup(1, 4), WaitingGroup(3, 1)], False)
@example([Batch(3, 6, 1)], [WaitingGroup(3, 1), WaitingGroup(2, 4), WaitingGroup(1, 4)], False)
def test_no_batch_is_given_a_group_and_then_emptied(
    held: list[Batch], waiting: list[WaitingGroup], gathers: bool
) -> None:
    commands = deal(held, waiting, may_open=False, gathers=gathers)
    for at, command in enumerate(commands):
        if isinstance(command, Empty):
            assert command.batch not in [before.batch for before in commands[:at]]


def test_the_last_samples_are_gathered_on_the_batch_that_the_last_group_joins() -> None:
    held = [Batch(1, 3, 5), Batch(1, 1, 7)]
    assert deal(held, [WaitingGroup(1, 1)], may_open=False, gathers=True) == [Give(0, 1), Empty(0)]


@given(batches, groups)
def test_nothing_is_gathered_for_nobody(held: list[Batch], waiting: list[WaitingGroup]) -> None:
    commands = deal(held, waiting, may_open=False, gathers=False)
    for at, command in enumerate(commands):
        if isinstance(command, Empty):
            assert isinstance(commands[at + 1], Give)
            assert commands[at + 1].batch == command.batch, "a group takes it at once"  # type: ignore[union-attr]


@given(st.lists(st.integers(0, PLACES), min_size=1, max_size=8), st.integers(0, 3))
def test_the_last_samples_are_gathered_on_as_few_batches_as_their_number_needs(counts: list[int], other: int) -> None:
    """Those of an older version when a newer group waits, and those of a job when nothing comes any more."""
    held = [Batch(1, count, PLACES - count) for count in counts]
    for waiting, gathers in (([WaitingGroup(2, 1)] * other, False), ([], True)):
        model = Model([Counter({1: count} if count else {}) for count in counts])
        now, rest = held, waiting
        for _ in range(4 * len(counts)):
            commands = deal(now, rest, may_open=False, gathers=gathers)
            if gathers:
                # Actors without samples end.
                now = [each for at, each in enumerate(now) if Empty(at) not in commands]
            rest = model.apply(commands, rest)
            if not gathers:
                held_now = [(*batch.items(),) for batch in model.samples]
                now = [Batch(*found[0], PLACES - found[0][1]) if found else Batch(1, 0, PLACES) for found in held_now]
            else:
                model.samples = [batch for batch in model.samples if batch or not commands]
                now = [Batch(1, sum(batch.values()), PLACES - sum(batch.values())) for batch in model.samples]
        needed = math.ceil(sum(counts) / PLACES)
        holders = sum(1 in batch for batch in model.samples)
        if gathers:
            assert holders == needed
        else:
            assert not [group for group in rest if group.version == 1], "all go on"
            assert holders == needed or not [group for group in rest if group.version == 2]
            assert any(2 in batch for batch in model.samples) == bool(other and needed < len(counts))


@given(seed=st.integers(0, 100_000), actors=st.integers(1, 5))
def test_every_sample_comes_to_its_end_with_the_weights_that_it_began_with(seed: int, actors: int) -> None:
    """Rollouts of newer and newer versions come; batches are lost; what is lost waits before all others."""
    chance = random.Random(seed)
    model = Model([Counter() for _ in range(actors)])
    versions = [0] * actors
    waiting: list[WaitingGroup] = []
    came = done = 0
    for step in range(5000):
        if step > 60 and not waiting and not any(model.samples):
            break
        if step < 60 and chance.random() < 0.3:
            version = step // 10
            waiting = [*waiting, *(WaitingGroup(version, 4) for _ in range(chance.randint(1, 4)))]
            came = sum(group.samples for group in waiting) + done + sum(sum(batch.values()) for batch in model.samples)
        held = [
            Batch(versions[at], sum(batch.values()), PLACES - sum(batch.values()))
            for at, batch in enumerate(model.samples)
        ]
        commands = deal(held, waiting, may_open=False, gathers=False)
        for command in commands:
            if isinstance(command, Give):
                versions[command.batch] = waiting[command.group].version
        waiting = model.apply(commands, waiting)
        for at, batch in enumerate(model.samples):
            if chance.random() < 0.05 and step < 100:
                waiting = [*(WaitingGroup(version, count) for version, count in batch.items()), *waiting]
                waiting.sort(key=lambda group: group.version)
                model.samples[at] = Counter()
            elif batch and chance.random() < 0.7:
                version = next(iter(batch))
                batch[version] -= 1
                done += 1
                model.samples[at] = +batch
    assert not waiting
    assert done == came


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_newest_groups_spread_and_older_ones_keep_to_batches_of_their_version(version: int) -> None:
    held = [Batch(version, 4, 4), Batch(1, 0, 8), Batch(2, 6, 2)]
    (command,) = deal(held, [WaitingGroup(version, 1)], may_open=False, gathers=False)
    assert command == Give(0, 1 if version == 2 else 0)


def test_a_lost_group_of_an_older_version_gets_the_batch_with_the_fewest_newer_samples() -> None:
    held = [Batch(3, 8, 0), Batch(3, 6, 1), Batch(2, 8, 0)]
    waiting = [WaitingGroup(1, 4), WaitingGroup(3, 1)]
    assert deal(held, waiting, may_open=False, gathers=False) == [Empty(1), Give(0, 1)], "the newer group waits"
    assert deal(held, waiting, may_open=True, gathers=False) == [Give(1, 1)], "another actor opens for it"


def test_an_older_group_waits_for_a_batch_of_its_version() -> None:
    assert deal([Batch(1, 8, 0), Batch(2, 8, 0)], [WaitingGroup(1, 4)], may_open=False, gathers=False) == []
