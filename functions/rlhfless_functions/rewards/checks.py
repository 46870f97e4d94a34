"""Checks of responses in a process that can be killed. A response can only delay its own check.

A check that takes long, uses much memory or ends its process scores 0 and is counted. The rest continue in a new fork.
"""

import contextlib
import os
import resource
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlhfless_functions.rewards.calls import Call
from rlhfless_functions.runtime.processes import die_with_parent

WAIT_FACTOR = 10
"""Wall-clock limit of a check as a multiple of its CPU limit, for a machine that is busy or out of memory."""
FATES = ("timed_out", "out_of_memory", "crashed")
"""Ways in which the check of a response may end early."""

_OUT_OF_MEMORY = 77
"""Exit code of a fork that reached its limit of memory."""
_SCORE = struct.Struct("=d")
_LEAST_MEMORY = 64 * 2**20
"""Bytes that a check may use even if its worker has reached its limit already."""


def check_each(check: Callable[[int], float], numbers: Sequence[int], seconds: float, call: Call) -> dict[int, float]:
    """Check each response.

    Args:
        check: scores one response by its number; changes that it makes are lost.
        numbers: numbers of the responses to check.
        seconds: CPU time of one check, which does not depend on the load of the machine.
        call: counts failed checks by `FATES`, 1 or 0 for each response.
    """
    scores: dict[int, float] = {}
    while len(scores) < len(numbers):
        left = [number for number in numbers if number not in scores]
        fate = None
        for number, answer in zip(left, _answers_of_a_fork(check, left, seconds), strict=False):
            scores[number], fate = (answer, None) if isinstance(answer, float) else (0.0, answer)
            count(call, fate)
    return scores


def count(call: Call, fate: str | None) -> None:
    """Count a response whose check finished (None), or ended by one of `FATES`."""
    for name in FATES:
        call.metrics.append((name, float(fate == name)))


def _answers_of_a_fork(check: Callable[[int], float], numbers: Sequence[int], seconds: float) -> Iterator[float | str]:
    """Yield scores as long as the fork lives, then its fate."""
    parent = os.getpid()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(parent)
            _limit_memory()
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            for number in numbers:
                # The kernel ends the process, even inside a call that never returns to Python.
                signal.setitimer(signal.ITIMER_PROF, seconds)
                os.write(writing, _SCORE.pack(check(number)))
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    late = False
    try:
        for _ in numbers:
            answer = _read(reading, time.monotonic() + WAIT_FACTOR * seconds)
            if not isinstance(answer, bytes):
                late = answer is None
                break
            yield _SCORE.unpack(answer)[0]
        else:
            return
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF):
        yield "timed_out"
    else:
        full = os.WIFEXITED(status) and os.WEXITSTATUS(status) == _OUT_OF_MEMORY
        yield "out_of_memory" if full else "crashed"


def _read(descriptor: int, deadline: float) -> bytes | bool | None:
    """Return a score; False once the other side has ended, None if it is late."""
    ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        return None
    # A pipe writes this few bytes atomically, so they arrive whole.
    return os.read(descriptor, _SCORE.size) or False


def _limit_memory() -> None:
    """Limit this fork to the rest of its worker's limit: the fork reaches its limit before the worker does."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY:
        return
    pages = [int(count) * resource.getpagesize() for count in Path("/proc/self/statm").read_text().split()]
    resident, data = pages[1], pages[5]
    own = min(limit, data + max(_LEAST_MEMORY, limit - 3 * resident))
    resource.setrlimit(resource.RLIMIT_DATA, (own, own))
