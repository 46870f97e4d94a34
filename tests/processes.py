"""The processes below this one, which may end at any moment while a test looks at them."""

import contextlib
import time
from collections.abc import Iterable

import psutil


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; a zombie has."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def named(name: str) -> list[psutil.Process]:
    """Those below this one that go by a name: an instance's."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == name:
                found.append(process)
    return living(found)


def children_with(argument: str) -> list[psutil.Process]:
    """The children of this process that have an argument in their command line, which a zombie has not."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            # The kernel tells the parent that a program is started before it has set its command line.
            while not (arguments := child.cmdline()):
                time.sleep(0.001)
            if argument in arguments:
                found.append(child)
    return found
