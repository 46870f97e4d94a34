"""How many tokens are drafted: by what they are likely to bring and what their rows cost."""

import numpy as np
import pytest

from rlhfless_functions.generation.drafting.acceptance import Acceptance
from rlhfless_functions.generation.drafting.costs import PassCosts, best_width, worthwhile
from rlhfless_functions.generation.drafting.switch import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_SEQUENCES,
    TRIAL_PASSES,
    Switch,
)


def padded(rows: int) -> int:
    return -(-rows // 16) * 16


def measured(fixed: float, row: float, drafting: float = 0.0, draft: float = 0.0) -> PassCosts:
    """Costs after many passes of an instance that takes exactly these seconds."""
    costs = PassCosts("cpu")
    for number in range(400):
        rows = 16 * (1 + number % 8)
        drafted = rows // 2 if number % 2 else 0
        costs.measured(rows, drafted, fixed + row * rows + (drafting + draft * drafted if drafted else 0.0))
    return costs


def test_costs_are_learnt_from_passes() -> None:
    costs = measured(0.002, 0.00006, 0.0004, 0.00001)
    for rows, drafted in ((16, 0), (128, 0), (64, 32), (128, 64)):
        expected = 0.002 + 0.00006 * rows + (0.0004 + 0.00001 * drafted if drafted else 0.0)
        assert costs.seconds(rows, drafted) == pytest.approx(expected, rel=0.15)


def test_a_pass_that_another_process_held_up_changes_little() -> None:
    costs = measured(0.002, 0.00006)
    before = costs.seconds(64)
    for _ in range(4):
        costs.measured(64, 0, 1.0)
    assert costs.seconds(64) < 1.2 * before


def test_rows_that_would_be_padding_are_drafted_and_dear_ones_are_not() -> None:
    costs = measured(0.0001, 0.001)
    assert worthwhile(np.full(100, 0.3), 3, 3, padded, 1024, costs) == 13
    assert worthwhile(np.full(100, 0.3), 16, 16, padded, 1024, costs) == 0


def test_where_rows_cost_little_likely_drafts_fill_a_pass_up_to_its_most_rows() -> None:
    costs = measured(0.01, 0.000001)
    assert worthwhile(np.full(100, 0.9), 16, 16, padded, 1024, costs) == 100
    assert worthwhile(np.full(100, 0.9), 16, 16, padded, 64, costs) == 48


def test_sequences_with_equally_many_rows_get_more_of_them_where_rows_cost_little_and_drafts_are_likely() -> None:
    likely, unlikely = np.full((8, 15), 0.9), np.full((8, 15), 0.02)
    cheap, dear = measured(0.01, 0.000001), measured(0.0001, 0.001)
    assert best_width(likely, 8, (1, 4, 16), 512, cheap) == 16
    assert best_width(likely, 8, (1, 4, 16), 127, cheap) == 4
    assert best_width(likely, 8, (1, 4, 16), 7, cheap) == 1
    assert best_width(likely, 8, (1, 4), 512, cheap) == 4
    assert best_width(unlikely, 8, (1, 4, 16), 512, dear) == 1
    # One sequence of eight has drafts: the others' rows are in vain.
    assert best_width(likely[:1], 8, (1, 4, 16), 512, measured(0.01, 0.001)) == 1


def test_chances_are_learnt_by_the_length_of_the_match() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.learn(np.array([3, 20]), np.array([4, 4]), np.array([0, 4]))
    short, long = acceptance.chances(np.array([3, 20]), 4)
    assert short[0] < 0.05
    assert long[0] > 0.95
    assert (np.diff(short) <= 0).all() and (np.diff(long) <= 0).all()


def test_a_prompt_whose_drafts_fail_is_expected_to_go_on_failing() -> None:
    acceptance = Acceptance()
    for _ in range(10):
        acceptance.learn_prompt(5, 0, 3.0)
        acceptance.learn_prompt(6, 3, 3.0)
    assert acceptance.factor(5) < 0.3
    assert acceptance.factor(6) == pytest.approx(1.0)
    assert acceptance.factor(7) == 1.0


def test_drafting_that_does_not_pay_is_tried_seldom_and_what_pays_in_a_tail_is_kept() -> None:
    switch = Switch("cuda")
    on = {128: 0, 2: 0}
    for _ in range(20_000):
        for sequences, saved in ((128, 0.0), (2, 0.003)):
            if switch.on(sequences):
                on[sequences] += 1
                switch.drafted(sequences, saved, 0.001)
    assert on[2] == 20_000
    assert on[128] < 20_000 * 2 * TRIAL_PASSES / LONGEST_PAUSE + 10 * TRIAL_PASSES
    assert on[128] > 2 * TRIAL_PASSES


def test_drafting_that_begins_to_pay_is_found_out() -> None:
    switch = Switch("cuda")
    for number in range(2000):
        if switch.on(4):
            switch.drafted(4, 0.002 if number > FIRST_PAUSE else 0.0, 0.001)
    assert switch.on(4)


def test_on_a_cpu_the_tail_alone_drafts() -> None:
    most = MOST_SEQUENCES["cpu"]
    switch = Switch("cpu")
    for _ in range(3 * TRIAL_PASSES):
        assert switch.on(most)
        switch.drafted(most, 0.002, 0.001)
        assert not switch.on(most + 1)
    assert Switch("cuda").on(most + 1)
