"""When waiting for a slot has cost as much as one more instance would have."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.pools.shortage import Shortage

START = 10.0
waits = st.lists(st.tuples(st.floats(0.01, 30), st.floats(0, 100)), min_size=1, max_size=20)
"""How long tasks wait for want of an instance, and the time between two waits."""


def test_waiting_adds_up_over_tasks_and_over_time() -> None:
    shortage = Shortage(0.0)
    assert shortage.observe(2, 1.0) == 0.0
    assert shortage.observe(0, 3.0) == 4.0, "two tasks for two seconds"
    assert shortage.observe(1, 100.0) == 4.0, "no task waited"
    assert shortage.observe(0, 101.0) == 5.0


def test_a_start_pays_for_what_was_waited() -> None:
    shortage = Shortage(0.0)
    shortage.observe(1, 0.0)
    shortage.observe(1, START)
    shortage.started()
    assert shortage.observe(0, START + 1.0) == 1.0


@given(waits)
def test_waiting_and_starting_take_at_most_twice_what_they_would_with_foresight(
    waits: Sequence[tuple[float, float]],
) -> None:
    """With foresight one starts at once, or never."""
    shortage, now, waited, started = Shortage(0.0), 0.0, 0.0, False
    for seconds, pause in waits:
        due = START - shortage.observe(1, now)
        # One that has started takes tasks; a look comes as the start is due, or as the wait ends.
        if not started and seconds >= due:
            now, waited, started = now + due, waited + due, True
            assert shortage.observe(0, now) >= START - 1e-6
            shortage.started()
            now += seconds - due
        else:
            now += seconds
            waited += 0.0 if started else seconds
            shortage.observe(0, now)
        now += pause
    foresight = min(START, sum(seconds for seconds, _ in waits))
    assert waited + (START if started else 0.0) <= 2 * foresight + 1e-6
