"""What a policy expects of lengths: what it has learnt, or what it is told."""

from dataclasses import replace

import pytest

from rlhfless_operator.planner.lengths import LengthEstimate
from rlhfless_operator.simulator.foresight import Foresight
from rlhfless_operator.simulator.instance import Response
from rlhfless_operator.simulator.policies import POLICIES, Told

LONGEST = 1000
LENGTHS = {0: [100, 120, 90, 1000], 1: [300, 700, 250, 280]}
RESPONSES = [
    Response(prompt, index, 50, length) for prompt, group in LENGTHS.items() for index, length in enumerate(group)
]
ESTIMATES = {0: LengthEstimate(110.0, 30.0, 2, 0.05), 1: LengthEstimate(280.0, 60.0, 2, 0.3)}
SHORT = [each for each in RESPONSES if each.length < 500]


def told(*what: Told) -> Foresight:
    settings = replace(POLICIES["rlhfless"], told=frozenset(what))
    return Foresight(settings, RESPONSES, ESTIMATES, LONGEST)


def by_key(foresight: Foresight) -> dict[tuple[int, int], float]:
    return dict(zip((each.key for each in RESPONSES), foresight.lengths(), strict=True))


def test_untold_it_expects_what_it_has_learnt() -> None:
    foresight = told()
    assert sorted(foresight.lengths()[:4]) == pytest.approx(sorted(ESTIMATES[0].quantiles(4)))
    assert foresight.lengths()[4] == LONGEST, "a third of the prompt's responses run away"
    assert foresight.runaways == {0: 0.05, 1: 0.3}
    assert foresight.outlook((0, 0), 50) == ESTIMATES[0].outlook(50, LONGEST)


def test_told_for_division_or_moves_it_knows_all_lengths_there() -> None:
    assert told("division").lengths() == [each.length for each in RESPONSES]
    assert set(told("division").runaways.values()) == {0.0}
    assert told("division").outlook((0, 3), 40) == ESTIMATES[0].outlook(40, LONGEST)
    assert told("migration").outlook((0, 3), 40) == (960.0, 0.0)
    assert told("migration").lengths() == told().lengths()


def test_told_which_are_long_it_knows_these_and_that_no_others_are() -> None:
    foresight = told("long")
    lengths = by_key(foresight)
    assert (lengths[0, 3], lengths[1, 1]) == (1000, 700)
    assert all(lengths[each.key] <= LONGEST / 2 for each in SHORT)
    assert set(foresight.runaways.values()) == {0.0}
    assert foresight.outlook((1, 1), 100) == (600.0, 0.0)
    assert foresight.outlook((1, 0), 100)[1] == 0.0


def test_told_all_others_it_takes_a_long_one_for_a_usual_one_until_it_is_longer() -> None:
    foresight = told("short")
    lengths = by_key(foresight)
    # The first of prompt 1 stands for the one that is likely to run away.
    assert [lengths[each.key] for each in SHORT if each.key != (1, 0)] == [
        each.length for each in SHORT if each.key != (1, 0)
    ]
    assert lengths[0, 3] == 110.0
    assert foresight.runaways == {0: 0.05, 1: 0.3}
    remaining, endless = foresight.outlook((0, 3), 100)
    assert (remaining, endless) == (pytest.approx(10 + 0.05 * 890), 0.05)
    assert foresight.outlook((0, 3), 200) == ESTIMATES[0].outlook(200, LONGEST)


def test_the_others_go_by_means() -> None:
    foresight = Foresight(POLICIES["paper"], RESPONSES, ESTIMATES, LONGEST)
    assert foresight.lengths() == [110.0] * 4 + [280.0] * 4
    assert foresight.outlook((0, 0), 30) == (80.0, 0.0)
