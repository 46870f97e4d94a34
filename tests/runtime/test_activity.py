"""For how long nothing has worked in a process."""

import pytest

from rlhfless_functions.runtime import activity as activity_module
from rlhfless_functions.runtime.activity import Activity, limited_wait


class Process:
    """A clock and an account of CPU time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.used = 1000.0, 5.0
        monkeypatch.setattr(Activity, "_cpu_seconds", lambda activity: self.used)
        monkeypatch.setattr(activity_module, "time", self)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_a_standstill_lasts_until_cpu_time_is_used(process: Process) -> None:
    activity = Activity()
    process.now += 130.0
    assert activity.still_seconds() == 130.0
    process.used += 0.1
    assert activity.still_seconds() == 0.0
    process.now += 7.0
    assert activity.still_seconds() == 7.0


def test_a_standstill_begins_with_the_first_question_after_a_sign_of_work(process: Process) -> None:
    activity = Activity()
    process.now += 130.0
    activity.goes_on()
    assert activity.still_seconds() == 0.0
    process.now += 7.0
    assert activity.still_seconds() == 7.0


def test_a_sign_of_work_looks_at_no_process(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    activity = Activity()
    monkeypatch.setattr(Activity, "_cpu_seconds", lambda activity: pytest.fail("it looks"))
    for _ in range(1000):
        activity.goes_on()


def test_a_wait_with_a_limit_is_no_standstill_until_the_limit(process: Process) -> None:
    activity = Activity()
    with limited_wait(200.0), limited_wait(10.0):
        process.now += 190.0
        assert activity.still_seconds() == 0.0
        process.now += 130.0
        assert activity.still_seconds() == 130.0, "what should have ended it stands still"
    process.now += 1.0
    with limited_wait(5.0):
        assert activity.still_seconds() == 0.0
    process.now += 2.0
    assert activity.still_seconds() == 2.0
