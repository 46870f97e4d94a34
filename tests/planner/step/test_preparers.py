"""How many instances prepare in an asynchronous job: the fewest that hold up no other stage, within the range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.step.preparers import BUSY, matching_preparers

SECONDS = st.floats(0.01, 1e4)
RANGES = st.tuples(st.integers(1, 8), st.integers(0, 8)).map(lambda each: (each[0], each[0] + each[1]))


@given(SECONDS, SECONDS, SECONDS, RANGES)
def test_they_are_the_fewest_that_are_not_the_slowest_stage(
    work: float, generation: float, learning: float, allowed: tuple[int, int]
) -> None:
    least, most = allowed
    found = matching_preparers(work, generation=generation, learning=learning, least=least, most=most).instances
    assert least <= found <= most
    pace = max(generation, learning) * (1 + 1e-6)
    assert found == most or work / found <= BUSY * pace
    assert found == least or work / (found - 1) > BUSY * max(generation, learning) * (1 - 1e-6)


@given(SECONDS, SECONDS, SECONDS, st.floats(1e-3, 1e3))
def test_only_the_ratios_of_the_rates_count(work: float, generation: float, learning: float, factor: float) -> None:
    def found(unit: float) -> int:
        return matching_preparers(
            work * unit, generation=generation * unit, learning=learning * unit, least=1, most=64
        ).instances

    assert abs(found(1.0) - found(factor)) <= 1, "but for rounding"


@pytest.mark.parametrize(("work", "learning"), [(0.0, 10.0), (10.0, 0.0)])
def test_the_fewest_prepare_until_something_is_measured(work: float, learning: float) -> None:
    found = matching_preparers(work, generation=0.0, learning=learning, least=2, most=5)
    assert (found.instances, found.reason) == (2, "the fewest, because the times of the stages are not known")


def test_the_reason_names_the_slowest_other_stage_and_what_is_missing() -> None:
    found = matching_preparers(40.0, generation=12.0, learning=20.0, least=1, most=8)
    assert (found.instances, found.reason) == (
        3, "preparation takes 40 instance-seconds a step, and learning takes 20 s"
    )  # fmt: skip
    found = matching_preparers(100.0, generation=20.0, learning=12.0, least=1, most=2)
    assert (found.instances, found.reason) == (
        2,
        "preparation takes 100 instance-seconds a step, and generation takes 20 s, for which 6 would be needed",
    )
