"""Rounds of dynamic sampling: which prompts a step draws, keeps and learns from."""

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.groups.dynamic_sampling import SamplingRounds
from rlhfless_operator.training.data.cursor import DataCursor


def sampled(rounds: SamplingRounds, teaching: set[int], cursor: DataCursor | None = None) -> list[list[int]]:
    """Take all rounds; what each of them drew."""
    cursor = cursor or DataCursor(rounds.available, 0, shuffle=False)
    drawn = []
    while rounds.count:
        drawn.append(cursor.draw(rounds.count, taken=rounds.taken))
        rounds.settle(drawn[-1], teaching.__contains__)
    return drawn


def test_groups_that_teach_nothing_are_replaced_by_the_next_prompts() -> None:
    rounds = SamplingRounds(groups=4, replacements=4, available=20)
    assert sampled(rounds, {0, 2, 5, 6}) == [[0, 1, 2, 3], [4, 5], [6]]
    assert rounds.chosen == [0, 2, 5, 6]
    assert (rounds.done, rounds.replaced) == (3, 3)


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    rounds = SamplingRounds(groups=4, replacements=0, available=20)
    assert sampled(rounds, set()) == [[0, 1, 2, 3]]
    assert (rounds.chosen, rounds.replaced, rounds.note(1)) == ([0, 1, 2, 3], 0, None)


def test_groups_that_teach_nothing_fill_the_batch_once_the_rounds_are_used_up() -> None:
    rounds = SamplingRounds(groups=3, replacements=1, available=20)
    assert sampled(rounds, {1}) == [[0, 1, 2], [3, 4]]
    assert rounds.chosen == [1, 0, 2], "those that were drawn first"
    assert rounds.replaced == 2
    note = "step 9, round 2: 4 of 5 groups had equal rewards; no round is left, and 2 of them fill the batch"
    assert rounds.note(9) == note


def test_where_the_prompts_run_out_the_last_of_them_are_tried() -> None:
    rounds = SamplingRounds(groups=4, replacements=4, available=6)
    assert sampled(rounds, {1, 5}) == [[0, 1, 2, 3], [4, 5]]
    assert rounds.chosen == [1, 5, 0, 2]
    note = "step 9, round 2: 4 of 6 groups had equal rewards; no prompt is left, and 2 of them fill the batch"
    assert rounds.note(9) == note


def test_after_each_round_a_person_is_told_what_follows() -> None:
    rounds = SamplingRounds(groups=4, replacements=4, available=20)
    rounds.settle([0, 1, 2, 3], {0, 1}.__contains__)
    words = (
        "step 2, round 1: 2 of 4 groups had equal rewards; 2 fresh prompts take the places of groups that teach nothing"
    )
    assert rounds.note(2) == words
    rounds.settle([4, 5], {4, 5}.__contains__)
    assert rounds.note(2) is None


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
        assert 1 <= len(drawn) <= replacements + 1
        assert sorted(rounds.taken) == sorted(set(rounds.taken)) == sorted(prompt for each in drawn for prompt in each)
        assert len(rounds.chosen) == groups
        taught = [prompt for prompt in rounds.taken if prompt in teaching]
        if replacements:
            assert len(teaching & set(rounds.chosen)) == min(groups, len(taught))
        if len(taught) < groups and replacements:
            assert len(drawn) == replacements + 1 or len(rounds.taken) == groups + spare


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
        drawn += len(rounds.taken)
        assert cursor.drawn == drawn
        assert len(first) == len(rounds.chosen) == groups, "every step is whole"
        if later:
            assert drawn <= whole, "only a first round goes beyond the last epoch, as without dynamic sampling"
    assert whole <= drawn < whole + groups, "no step is left out, and none is too much"
