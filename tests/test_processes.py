"""Looking at processes that end meanwhile."""

import os
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from tests.processes import children_with, living, named


@pytest.fixture
def zombie() -> Iterator[psutil.Process]:
    """A child that has ended, and whose parent has not waited for it."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield psutil.Process(process.pid)


def test_a_child_that_has_just_ended_is_no_fault(zombie: psutil.Process) -> None:
    with pytest.raises(psutil.ZombieProcess):
        zombie.cmdline()
    assert children_with("true") == named("true") == living([zombie]) == []


def test_a_child_that_has_just_begun_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line is empty for a moment."""
    read = psutil.Process.cmdline
    early = [[], []]
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: early.pop() if early else read(process))
    with subprocess.Popen(["sleep", "600"]) as process:
        found = [child.pid for child in children_with("600")]
        process.kill()
    assert found == [process.pid]


def test_a_child_is_found_while_it_lives() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        (found,) = children_with("600")
        assert found.pid == process.pid
        assert found in named("sleep")
        assert living([found]) == [found]
        process.kill()
        process.wait()
        assert living([found]) == []
