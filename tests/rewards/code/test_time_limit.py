"""The time of a test: on the clock for what waits, CPU time for what computes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from rlhfless_functions.rewards.code.time_limit import TimeLimit


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def make(program: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", program], start_new_session=True))
        return started[-1]

    yield make
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def over(limit: TimeLimit) -> bool:
    """Whether the limit is over before very long."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(min(limit.left(), 0.1))
        if limit.is_over():
            return True
    return False


@pytest.mark.parametrize(
    "program",
    [
        "import time; time.sleep(1000)",
        "while True: pass",
        "import os\nif os.fork() == 0:\n    while True: pass\nos.wait()",
        "import threading\nthreading.Event().wait()",
    ],
)
def test_what_sleeps_or_computes_too_long_is_over(
    start: Callable[[str], subprocess.Popen[bytes]], program: str
) -> None:
    assert over(TimeLimit([start(program)], 0.2))


def test_what_waits_for_a_core_has_time_left(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    # Its own clock says a millionth of a second; only CPU time and the factor count for what computes.
    limit = TimeLimit([start("while True: pass")], 3600.0)
    assert not limit.is_over()
    assert limit.left() > 3000
