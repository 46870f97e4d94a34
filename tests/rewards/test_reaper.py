"""The children of a process, by the kernel's list or by a look at all processes."""

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from rlhfless_functions.rewards import reaper


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """A process with children of two of its threads, and a grandchild."""
    code = """
import subprocess, sys, threading
def start(): subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for _ in range(2):
    thread = threading.Thread(target=start); thread.start(); thread.join()
subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
print("there", flush=True)
input()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()


@pytest.mark.parametrize("listed", [True, False])
def test_the_children_are_those_that_psutil_finds(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    if listed and not reaper._LISTS_CHILDREN:
        pytest.skip("this kernel has no list of a thread's children")
    monkeypatch.setattr(reaper, "_LISTS_CHILDREN", listed)
    found = reaper.children(family.pid)
    assert sorted(found) == sorted(child.pid for child in psutil.Process(family.pid).children())
    assert len(found) == 3


def test_a_process_that_has_ended_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert reaper.children(ended.pid) == []
    monkeypatch.setattr(reaper, "_LISTS_CHILDREN", False)
    assert reaper.children(ended.pid) == []
    assert os.getpid() not in reaper.children(os.getpid())
