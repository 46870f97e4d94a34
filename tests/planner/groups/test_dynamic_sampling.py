"""Dynamic sampling: which prompts a step draws, keeps and learns from."""

import random

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.groups.dynamic_sampling import SamplingRounds
from rlhfless_operator.training.data.cursor import DataCursor


def sampled(rounds: SamplingRounds, teaching: set[int], cursor: DataCursor | None = None) -> list[list[int]]:
    """Take all rounds, one after the other; what each of them drew."""
    cursor = cursor or DataCursor(rounds.available, 0, shuffle=False)
    drawn = []
    while count := rounds.count:
        drawn.append(cursor.draw(count, taken=rounds.drawn))
        rounds.draw(drawn[-1])
        for prompt in drawn[-1]:
            rounds.settle(prompt, teaches=prompt in teaching)
    assert rounds.is_over
    return drawn


def sampled_at_once(rounds: SamplingRounds, teaching: set[int], cursor: DataCursor, order: random.Random) -> None:
    """Settle the groups in any order, and replace each as soon as it is known."""
    waiting: list[int] = []
    while not rounds.is_over:
        if count := rounds.count:
            waiting += (prompts := cursor.draw(count, taken=rounds.drawn))
            rounds.draw(prompts)
        prompt = waiting.pop(order.randrange(len(waiting)))
        rounds.settle(prompt, teaches=prompt in teaching)


def test_groups_that_teach_nothing_are_replaced_by_the_next_prompts() -> None:
    rounds = SamplingRounds(groups=4, replacements=4, available=20)
    assert sampled(rounds, {0, 2, 5, 6}) == [[0, 1, 2, 3], [4, 5], [6]]
    assert rounds.chosen == [0, 2, 5, 6]
    assert (rounds.done, rounds.replaced) == (3, 3)


def test_a_group_is_replaced_while_others_of_its_round_are_under_way() -> None:
    rounds = SamplingRounds(groups=4, replacements=1, available=20)
    rounds.draw([0, 1, 2, 3])
    assert rounds.count == 0
    rounds.settle(2, teaches=False)
    assert rounds.count == 1
    rounds.draw([4])
    rounds.settle(4, teaches=False)
    assert rounds.count == 0, "its place is of the last round"
    rounds.settle(0, teaches=False)
    assert rounds.count == 1
    rounds.draw([5])
    for prompt in (1, 3, 5):
        rounds.settle(prompt, teaches=True)
    assert rounds.is_over
    assert rounds.chosen == [1, 3, 5, 0]


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    rounds = SamplingRounds(groups=4, replacements=0, available=20)
    assert sampled(rounds, set()) == [[0, 1, 2, 3]]
    assert (rounds.chosen, rounds.replaced, rounds.note(1)) == ([0, 1, 2, 3], 0, None)


def test_groups_that_teach_nothing_fill_the_batch_once_the_rounds_are_used_up() -> None:
    rounds = SamplingRounds(groups=3, replacements=1, available=20)
    assert sampled(rounds, {1}) == [[0, 1, 2], [3, 4]]
    assert rounds.chosen == [1, 0, 2], "those that were drawn first"
    assert rounds.replaced == 2
    note = "step 9: 4 of 5 groups in 2 rounds had equal rewards; no round is left, and 2 of them fill the batch"
    assert rounds.note(9) == note


def test_where_the_prompts_run_out_the_last_of_them_are_tried() -> None:
    rounds = SamplingRounds(groups=4, replacements=4, available=6)
    assert sampled(rounds, {1, 5}) == [[0, 1, 2, 3], [4, 5]]
    assert rounds.chosen == [1, 5, 0, 2]
    note = "step 9: 4 of 6 groups in 2 rounds had equal rewards; no prompt is left, and 2 of them fill the batch"
    assert rounds.note(9) == note


def test_a_person_is_told_what_was_replaced() -> None:
    rounds = SamplingRounds(groups=4, replacements=4, available=20)
    sampled(rounds, {0, 1, 4, 5})
    told = "step 2: 2 of 6 groups in 2 rounds had equal rewards"
    assert rounds.note(2) == f"{told}; fresh prompts took the places of groups that teach nothing"
    scarce = SamplingRounds(groups=4, replacements=4, available=4)
    sampled(scarce, {0})
    told = "step 2: 3 of 4 groups in 1 round had equal rewards"
    assert scarce.note(2) == f"{told}; no prompt is left, and 3 of them fill the batch"
    whole = SamplingRounds(groups=4, replacements=4, available=20)
    sampled(whole, {0, 1, 2, 3})
    assert whole.note(2) is None


@given(
    groups=st.integers(1, 8),
    replacements=st.integers(0, 16),
    spare=st.integers(0, 20),
    teaching=st.sets(st.integers(0, 27)),
    steps=st.integers(1, 4),
)
def test_every_step_is_whole_takes_no_prompt_twice_and_prefers_what_teaches(
    groups: int, replacements: int, spare: int, teaching: set[int], steps: int
) -> None:
    cursor = DataCursor(groups + spare, 3, shuffle=True)
    for _ in range(steps):
        rounds = SamplingRounds(groups, replacements, groups + spare)
        drawn = sampled(rounds, teaching, cursor)
        assert 1 <= len(drawn) == rounds.done <= replacements + 1
        assert sorted(rounds.drawn) == sorted(set(rounds.drawn)) == sorted(prompt for each in drawn for prompt in each)
        assert len(rounds.chosen) == groups
        taught = [prompt for prompt in rounds.drawn if prompt in teaching]
        if replacements:
            assert len(teaching & set(rounds.chosen)) == min(groups, len(taught))
        if len(taught) < groups and replacements:
            assert len(drawn) == replacements + 1 or len(rounds.drawn) == groups + spare


@given(
    groups=st.integers(1, 8),
    replacements=st.integers(0, 5),
    spare=st.integers(0, 20),
    left=st.none() | st.integers(1, 30),
    teaching=st.sets(st.integers(0, 27)),
    seed=st.integers(0, 2**16),
)
def test_replaced_at_once_or_round_by_round_the_same_prompts_are_drawn_and_learnt_from(
    groups: int, replacements: int, spare: int, left: int | None, teaching: set[int], seed: int
) -> None:
    by_rounds, at_once = (SamplingRounds(groups, replacements, groups + spare, left) for _ in range(2))
    cursors = [DataCursor(groups + spare, 3, shuffle=True) for _ in range(2)]
    for cursor in cursors:
        cursor.draw(groups // 2)
    sampled(by_rounds, teaching, cursors[0])
    sampled_at_once(at_once, teaching, cursors[1], random.Random(seed))
    assert at_once.drawn == by_rounds.drawn
    assert (at_once.chosen, at_once.done, at_once.note(1)) == (by_rounds.chosen, by_rounds.done, by_rounds.note(1))
    assert cursors[0].state() == cursors[1].state()


@given(
    groups=st.integers(1, 6),
    replacements=st.integers(0, 4),
    spare=st.integers(0, 20),
    weight=st.sampled_from([0.4, 1.0, 2.5]),
    epochs=st.integers(1, 3),
    teaching=st.sets(st.integers(0, 25)),
    interrupted=st.booleans(),
)
def test_epochs_end_with_their_prompts_wherever_a_driver_ends(
    groups: int, replacements: int, spare: int, weight: float, epochs: int, teaching: set[int], interrupted: bool
) -> None:
    prompts = groups + spare
    cursor = DataCursor(prompts, 3, shuffle=True, mix=[(prompts - spare // 2, weight), (spare // 2, 1.0)])
    whole, drawn = cursor.prompts_in(epochs), 0
    for _ in range(-(-whole // groups)):
        left = whole - cursor.drawn
        if left <= 0:
            break
        if interrupted:
            cursor = cursor.restored(cursor.state())
        rounds = SamplingRounds(groups, replacements, prompts, left)
        first, *later = sampled(rounds, teaching, cursor)
        drawn += len(rounds.drawn)
        assert cursor.drawn == drawn
        assert len(first) == len(rounds.chosen) == groups, "every step is whole"
        if later:
            assert drawn <= whole, "only a first round goes beyond the last epoch, as without dynamic sampling"
    assert whole <= drawn < whole + groups, "no step is left out, and none is too much"
