"""An instance's control of the processes that learn with it.

The instance is the first of its ranks. It starts the others when a request needs them, and sends them every request:
all of them take the same steps. It does the work of torchrun, because only a request says how many there are, and
because an instance may be a child of the fork server. A failure of one ends all of them, and the next attempt starts
new ones from the newest checkpoint. If several instances learn together, each has a team.
"""

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from rlhfless_functions.distributed.ranks import Ranks, Seat, join
from rlhfless_functions.runtime.task import TaskError

_START_SECONDS = 600.0
"""Time limit for a process to start: it imports torch, perhaps from a slow disk or on a busy machine."""
_LAST_WORDS_SECONDS = 5.0
"""Seconds to wait for a process's error message: its end may be noticed before it has written the message."""
READY = "ready"
"""The line that a process writes once it runs."""
SLEEP = "sleep"
"""The line that tells it to release its device's memory; other lines name a request's file."""


class Team:
    """An instance's ranks: this process and the others. Call `join` next.

    Args:
        size: number of ranks.

    Raises:
        TaskError: a process does not start.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.seat: Seat | None = None
        """This process among all ranks, once it has joined them."""
        self._store: dist.Store | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="rlhfless-ranks-"))
        self._others: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(1, size):
                arguments = map(str, (os.getpid(), self._folder, number, torch.get_num_threads()))
                command = [sys.executable, "-m", "rlhfless_functions.learning.rank_process", *arguments]
                self._others.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            self._await_ready()
        except BaseException:
            self.end()
            raise

    def join(self, seat: Seat | None = None, store: dist.Store | None = None) -> Ranks:
        """Join the other ranks.

        Args:
            seat: seat of this process, if other instances have ranks too.
            store: the store to keep open as long as the ranks are together.

        Raises:
            TaskError: a process is gone.
            RuntimeError: the ranks of other instances do not join.
        """
        self.seat, self._store = seat or Seat(0, self.size, folder=str(self._folder)), store
        try:
            for number, process in enumerate(self._others, 1):
                self._write(process, json.dumps(asdict(replace(self.seat, rank=self.seat.rank + number))))
            return join(self.seat)
        except BaseException as error:
            told = self.failure() if isinstance(error, RuntimeError) else None
            self.end()
            if told is None:
                raise
            raise told from error

    def tell(self, request: str) -> None:
        """Send a request to every other rank.

        Raises:
            TaskError: one of them is gone.
        """
        (self._folder / "request.json").write_text(request)
        self._say("request.json")

    def sleep(self) -> None:
        """Tell every other rank to release its device's memory.

        Raises:
            TaskError: one of them is gone.
        """
        self._say(SLEEP)

    def failure(self) -> TaskError | None:
        """Return the error of another rank, if one has ended. Then all of them have ended."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._others and all(process.poll() is None for process in self._others) and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = [process for process in self._others if process.poll() is not None]
        for process in self._others:
            process.kill()
            process.wait()
        for process in self._others:
            assert process.stdout is not None
            said = process.stdout.read().splitlines()
            if said and said[-1] != READY.encode():
                told = json.loads(said[-1])
                return TaskError(told["reason"], told["message"], retryable=told["retryable"])
        return _lost(f"ended with status {ended[0].returncode}") if ended else None

    def end(self) -> None:
        """End the other processes."""
        for process in self._others:
            process.kill()
        for process in self._others:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # a line that a rank had not read when it ended
                    pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _say(self, line: str) -> None:
        for process in self._others:
            self._write(process, line)

    def _write(self, process: subprocess.Popen[bytes], line: str) -> None:
        # A short line fits into the pipe's buffer, so this never blocks on a process that does not read.
        assert process.stdin is not None
        if process.poll() is not None:
            # A program that it has started may still hold its end of the pipe.
            raise self.failure() or _lost("is gone")
        try:
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()
        except OSError as error:
            raise self.failure() or _lost("is gone") from error

    def _await_ready(self) -> None:
        """Wait until all ranks run. Otherwise a collective could wait forever for one that failed to start."""
        deadline = time.monotonic() + _START_SECONDS
        with selectors.DefaultSelector() as waiting:
            for process in self._others:
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ)
            while waiting.get_map():
                found = waiting.select(deadline - time.monotonic())
                if not found:
                    raise _lost(f"did not start within {_START_SECONDS:.0f} s")
                for key, _ in found:
                    assert not isinstance(key.fileobj, int)
                    if os.read(key.fd, len(READY) + 1) != f"{READY}\n".encode():
                        raise self.failure() or _lost("did not start")
                    waiting.unregister(key.fileobj)


def _lost(what: str) -> TaskError:
    return TaskError(
        "internal",
        f"a learning process {what}; take the step again. Its own log says why; if the kernel killed it, there is too"
        " little memory for learning.processes",
        retryable=True,
    )
