"""One worker process from its parent's view: starts it, talks to it with a time limit, and ends it completely."""

import contextlib
import json
import logging
import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from rlhfless_functions.rewards.channel import ChannelError, FrameBuffer, send
from rlhfless_functions.runtime.activity import limited_wait

_log = logging.getLogger("rlhfless.rewards")

_TICK = 0.2
"""Seconds between checks of the clock, the caller's wish to stop, and the worker's memory."""
_LONGEST_LINE = 2000
_MOST_LINES = 200
"""Most lines of output that one call may log; the rest is counted."""


VERIFIERS = ("exact_match", "math", "format", "code")
"""Kinds of the built-in verifiers. What ends their workers is a response."""
_NEEDED = re.compile("PATH|HOME|LANG|TZ|TMPDIR|(LC_|LD_|PYTHON|COV).*")
"""Environment variables that built-in verifiers need. The others may hold credentials, for which hostile code looks."""


class WorkerError(Exception):
    """The worker did not answer; the message continues a sentence that starts with the reward's name.

    Args:
        fate: the limit that it reached, of `checks.FATES`.
    """

    def __init__(self, message: str, fate: str = "crashed") -> None:
        super().__init__(message)
        self.fate = fate


class WorkerKilledError(WorkerError):
    """Something outside killed the worker; a retry may succeed."""


class WorkerStopped(Exception):  # noqa: N818 - not an error: the caller asked for it
    """The caller no longer wants the answer."""


class WorkerProcess:
    """A worker process and everything below it.

    Args:
        name: the reward's name, for the log.
        kind: the reward's kind.
        memory: limit in bytes for each process, and for all of them together.
    """

    def __init__(self, name: str, kind: str, memory: int) -> None:
        self.name = name
        self._memory = memory
        self._connection, connection = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        output, output_writer = os.pipe()
        with connection, lifeline:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "rlhfless_functions.rewards.worker",
                    str(connection.fileno()), str(lifeline.fileno()), kind, str(memory),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output_writer,
                stderr=output_writer,
                env=_environment(kind),
                pass_fds=(connection.fileno(), lifeline.fileno()),
                start_new_session=True,
            )  # fmt: skip
        os.close(output_writer)
        os.set_blocking(output, False)
        self._connection.setblocking(False)
        self._output = output
        self._output_tail = b""
        self._lines = 0
        self._frames = FrameBuffer()
        self._selector = selectors.DefaultSelector()
        for source in (self._connection, self._lifeline, self._output):
            self._selector.register(source, selectors.EVENT_READ)
        self.ready = False
        """Whether the reward has been loaded."""

    def alive(self) -> bool:
        """Return whether the worker still runs, without waiting."""
        ready = {key.fileobj for key, _ in self._selector.select(0)}
        return self._lifeline not in ready

    def send(self, request: dict[str, Any], seconds: float) -> None:
        """Send a request to an idle worker.

        Raises:
            WorkerError: it does not take the request within the time, or has ended.
        """
        self._lines = 0
        self._connection.settimeout(seconds)
        try:
            send(self._connection, pickle.dumps(request))
        except TimeoutError:
            raise WorkerError(f"took no request within {seconds:g} s") from None
        except OSError:
            raise self._ended() from None
        finally:
            self._connection.setblocking(False)

    def receive(self, seconds: float, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Wait for the next answer. Meanwhile log the worker's output, and watch its memory. The worker may itself wait
        for a server: that is no standstill of this instance.

        Raises:
            WorkerKilledError: something outside killed it.
            WorkerError: it takes longer, uses too much memory, ends, or breaks the protocol.
            WorkerStopped: `stopped` returned True.
        """
        with limited_wait(seconds):
            return self._receive(seconds, stopped)

    def _receive(self, seconds: float, stopped: Callable[[], bool]) -> dict[str, Any]:
        look = time.monotonic() + _TICK
        deadline = look - _TICK + seconds
        while True:
            try:
                frame = self._frames.take()
                if frame is not None:
                    self._read_output()
                    answer = json.loads(frame)
                    if isinstance(answer, dict):
                        return answer
                    raise ValueError
            except (ChannelError, ValueError):
                raise WorkerError(
                    "wrote to the worker's own socket; a reward must not write to descriptors that it did not open"
                ) from None
            now = time.monotonic()
            if now >= deadline:
                raise WorkerError(f"took longer than {seconds:g} s", "timed_out")
            if now >= look:
                look = now + _TICK
                if stopped():
                    raise WorkerStopped
                self._check_memory()
            ready = {key.fileobj for key, _ in self._selector.select(min(deadline, look) - now)}
            if self._output in ready:
                self._read_output()
            if self._connection in ready and self._read_connection():
                continue
            if self._lifeline in ready:
                raise self._ended()

    def close(self) -> None:
        """End the worker and all of its descendants."""
        end_processes(self._process, self._lifeline)
        self._read_output()
        self._selector.close()
        self._connection.close()
        self._lifeline.close()
        os.close(self._output)

    def _read_connection(self) -> bool:
        """Return whether bytes came."""
        try:
            piece = self._connection.recv(2**20)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        if not piece:
            # Closed. The lifeline shows when the worker has ended, or the clock that it has not.
            self._selector.unregister(self._connection)
            return False
        self._frames.add(piece)
        return True

    def _read_output(self) -> None:
        while True:
            try:
                piece = os.read(self._output, 2**16)
            except OSError:
                break
            if not piece:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(self._output)
                break
            *lines, self._output_tail = (self._output_tail + piece).split(b"\n")
            self._output_tail = self._output_tail[-_LONGEST_LINE:]
            for line in lines:
                self._log_line(line)

    def _log_line(self, line: bytes) -> None:
        self._lines += 1
        if self._lines <= _MOST_LINES:
            _log.info("reward %s: %s", self.name, line[:_LONGEST_LINE].decode(errors="replace"))
        elif self._lines == _MOST_LINES + 1:
            _log.info("reward %s: (more output, not logged)", self.name)

    def _ended(self) -> WorkerError:
        # The lifeline closes a moment before the reaper is gone.
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return WorkerError("closed its worker's sockets")
        self._read_output()
        if code == -signal.SIGKILL:
            return WorkerKilledError("was killed from outside (SIGKILL; the kernel does this when memory runs out)")
        if code < 0:
            return WorkerError(f"ended its worker process by {signal.Signals(-code).name}")
        return WorkerError(f"ended its worker process with exit code {code}")

    def _check_memory(self) -> None:
        used = 0
        with contextlib.suppress(psutil.Error):
            reaper = psutil.Process(self._process.pid)
            for process in reaper.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    used += process.memory_info().rss
        if used > self._memory:
            raise WorkerError(
                f"used {used / 2**20:.0f} MiB of memory, more than its limit of {self._memory / 2**20:.0f} MiB",
                "out_of_memory",
            )


def end_processes(reaper: subprocess.Popen[bytes], lifeline: socket.socket) -> None:
    """End a reaper and the processes below it, by closing its lifeline."""
    with contextlib.suppress(OSError):
        lifeline.shutdown(socket.SHUT_RDWR)
    try:
        # Killing takes the reaper milliseconds. Only a stopped or broken one must be killed itself.
        reaper.wait(5)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(reaper.pid, signal.SIGKILL)
        reaper.wait()


def _environment(kind: str) -> dict[str, str]:
    """Return the environment of a worker. A user's own reward may need all of it but the job's token, which gives
    access to its functions."""
    if kind in VERIFIERS:
        return {name: value for name, value in os.environ.items() if _NEEDED.fullmatch(name)}
    return {name: value for name, value in os.environ.items() if name != "RLHFLESS_TOKEN"}
