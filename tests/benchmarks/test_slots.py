"""What the benchmark of jobs that take turns makes of the states of pods."""

import pytest

from benchmarks.cluster.slot_timeline import Timeline
from rlhfless_operator.platforms.base import InstanceState, StateChange


def timeline(*changes: tuple[str, str, InstanceState, float]) -> Timeline:
    made = Timeline()
    made.placed("actor", ["a"])
    made.placed("learner", ["a", "b"])
    for job, pod, state, at in changes:
        made.observe(job, StateChange(pod, "learning" if pod == "learner" else "generation", state, at))
    return made


def test_shares_are_of_the_time_of_all_slots() -> None:
    made = timeline(
        ("one", "actor", "asleep", 0.0),
        ("one", "actor", "busy", 0.0),
        ("one", "actor", "switching", 4.0),
        ("one", "actor", "asleep", 5.0),
        ("other", "learner", "asleep", 0.0),
        ("other", "learner", "switching", 5.0),
        ("other", "learner", "busy", 6.0),
        ("other", "learner", "idle", 9.0),
        ("other", "learner", "ended", 10.0),
    )
    shares = made.shares(2, 0.0, 10.0)
    assert shares == pytest.approx({"busy": 0.5, "switching": 0.15, "idle": 0.1, "draining": 0.0, "free": 0.25})
    assert made.shares(2, 0.0, 10.0, job="one")["busy"] == pytest.approx(0.2)
    assert made.shares(2, 6.0, 9.0)["busy"] == 1.0
    assert made.first_work("other", "learning") == 6.0
    hands = made.changes_of_hands(scale=0.5)
    assert (hands["count"], hands["mean"]) == (1, pytest.approx(4.0)), (
        "one second to sleep and one to wake, at half speed"
    )
