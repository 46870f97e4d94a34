"""A host of episodes in the user's own Python, from its parent's view: starts it, asks episodes with a time limit, and
ends them completely."""

import contextlib
import json
import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts.copies import cache_folder
from rlhfless_functions.environments.sessions import (
    EnvironmentUnusableError,
    EpisodeFailedError,
    EpisodeKilledError,
    EpisodeLateError,
)
from rlhfless_functions.rewards.channel import ChannelError, FrameBuffer, send
from rlhfless_functions.rewards.process import end_processes
from rlhfless_functions.runtime.activity import limited_wait
from rlhfless_functions.settings import EnvironmentSettings

_log = logging.getLogger("rlhfless.environments")

LOAD_SECONDS = 300.0
"""Time limit for running the user's files, which may import heavy libraries."""
FORK_SECONDS = 120.0
"""Time limit for forking an episode."""
_LOOK = 1.0
"""Seconds between looks at an episode's memory."""
_LONGEST_LINE = 2000
_MOST_LINES = 1000
"""Most lines of a host's output that are logged."""


class EpisodeProcess:
    """One episode's processes; see `Session`."""

    def __init__(self, connection: socket.socket, lifeline: socket.socket) -> None:
        self.waited = 0.0
        self._connection = connection
        self._lifeline = lifeline
        self._frames = FrameBuffer()
        self._keeper: int | None = None

    def ask(self, request: dict[str, Any], seconds: float, memory: int) -> dict[str, Any]:
        """Ask, and wait for the answer; see `Session`."""
        with limited_wait(seconds + FORK_SECONDS):
            if self._keeper is None:
                # Not the environment's own time: the host forks one episode after the other.
                began = time.monotonic()
                try:
                    hello = self._receive(time.monotonic() + FORK_SECONDS, FORK_SECONDS, memory)
                except EpisodeLateError:
                    raise EpisodeKilledError(f"did not begin within {FORK_SECONDS:g} s") from None
                self._keeper = int(hello["keeper"])
                self.waited += time.monotonic() - began
            deadline = time.monotonic() + seconds
            try:
                self._connection.settimeout(seconds)
                send(self._connection, pickle.dumps(request))
            except TimeoutError:
                raise EpisodeLateError(f"took no request within {seconds:g} s") from None
            except OSError:
                raise self._ended() from None
            answer = self._receive(deadline, seconds, memory)
        if "error" in answer:
            raise EpisodeFailedError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End its processes. A thread that waits for an answer gets an error."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lifeline.close()
        self._connection.close()

    def _receive(self, deadline: float, seconds: float, memory: int) -> dict[str, Any]:
        look = time.monotonic() + _LOOK
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while True:
                try:
                    frame = self._frames.take()
                    if frame is not None:
                        answer = json.loads(frame)
                        if not isinstance(answer, dict):
                            raise ValueError
                        return answer
                except (ChannelError, ValueError):
                    raise EpisodeFailedError(
                        "wrote to its process's own socket; it must not write to descriptors that it did not open"
                    ) from None
                now = time.monotonic()
                if now >= deadline:
                    raise EpisodeLateError(f"took longer than {seconds:g} s")
                if now >= look:
                    look = now + _LOOK
                    self._check_memory(memory)
                if not selector.select(min(deadline, look) - now):
                    if self._connection.fileno() < 0:
                        raise EpisodeKilledError("was ended")
                    continue
                try:
                    piece = self._connection.recv(2**20)
                except OSError:
                    piece = b""
                if not piece:
                    raise self._ended()
                self._frames.add(piece)

    def _ended(self) -> Exception:
        """Return the reason why the process has ended."""
        try:
            self._lifeline.settimeout(2)
            told = self._lifeline.recv(64)
        except OSError:
            told = b""
        status = int(told) if told.isdigit() else signal.SIGKILL
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGKILL:
                return EpisodeKilledError("was killed from outside")
            return EpisodeFailedError(f"ended its process by {signal.Signals(number).name}")
        return EpisodeFailedError(f"ended its process with exit code {os.waitstatus_to_exitcode(status)}")

    def _check_memory(self, limit: int) -> None:
        used = sum(_resident(process) for process in _below(self._keeper)) if self._keeper is not None else 0
        if used > limit:
            raise EpisodeFailedError(
                f"used {used / 2**20:.0f} MiB of memory, more than environment.memory ({limit / 2**20:.0f} MiB)"
            )


class EpisodeHost:
    """The process that has run the user's files, and forks episodes; see `Host`.

    Args:
        settings: the job's environment.

    Raises:
        EnvironmentUnusableError: the files can't be used.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._connection, connection = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        self._lock = threading.Lock()
        with connection, lifeline:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "rlhfless_functions.environments.worker",
                    str(connection.fileno()), str(lifeline.fileno()), str(settings.memory),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # The job's token gives access to its functions.
                env={name: value for name, value in os.environ.items() if name != "RLHFLESS_TOKEN"},
                pass_fds=(connection.fileno(), lifeline.fileno()),
                start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._log_output, daemon=True).start()
        try:
            answer = self._load()
        except BaseException:
            self.close()
            raise
        self.schemas: list[dict[str, Any]] = answer["schemas"]
        """JSON schemas of the tools."""
        self.is_game: bool = answer["game"]
        """Whether the environment takes text, and has no tools."""

    def alive(self) -> bool:
        """Return whether it still runs."""
        return self._process.poll() is None

    def begin(self) -> EpisodeProcess:
        """Fork an episode.

        Raises:
            EpisodeKilledError: the host is gone.
        """
        connection, own = socket.socketpair()
        lifeline, life = socket.socketpair()
        with own, life:
            try:
                with self._lock:
                    socket.send_fds(self._connection, [b"e"], [own.fileno(), life.fileno()])
            except OSError:
                connection.close()
                lifeline.close()
                raise EpisodeKilledError("its host was killed from outside") from None
        return EpisodeProcess(connection, lifeline)

    def close(self) -> None:
        """End it and all of its episodes."""
        end_processes(self._process, self._lifeline)
        self._lifeline.close()
        self._connection.close()

    def _load(self) -> dict[str, Any]:
        kept = None
        with contextlib.suppress(artifacts.ArtifactUnwritableError):
            kept = cache_folder()
        setup = {**_setup(self._settings), "result_bytes": self._settings.result_bytes, "kept": kept}
        frames = FrameBuffer()
        deadline = time.monotonic() + LOAD_SECONDS
        try:
            send(self._connection, pickle.dumps(setup))
            with limited_wait(LOAD_SECONDS):
                while (frame := frames.take()) is None:
                    self._connection.settimeout(max(0.01, deadline - time.monotonic()))
                    piece = self._connection.recv(2**20)
                    if not piece:
                        code = self._process.wait(5)
                        raise EnvironmentUnusableError(f"ended its process with status {code} while it was loaded")
                    frames.add(piece)
            answer = json.loads(frame)
        except TimeoutError:
            raise EnvironmentUnusableError(f"took longer than {LOAD_SECONDS:g} s to load") from None
        except (OSError, ChannelError, ValueError, subprocess.TimeoutExpired) as error:
            raise EnvironmentUnusableError(f"can't be loaded ({error})") from error
        self._connection.settimeout(None)
        if not answer.get("ready"):
            raise EnvironmentUnusableError(str(answer.get("error")))
        return dict(answer)

    def _log_output(self) -> None:
        assert self._process.stdout is not None
        count = 0
        with self._process.stdout as output:
            while line := output.readline(_LONGEST_LINE):
                count += 1
                if count <= _MOST_LINES:
                    _log.info("environment: %s", line.rstrip(b"\n").decode(errors="replace"))
                elif count == _MOST_LINES + 1:
                    _log.info("environment: (more output, not logged)")


def _setup(settings: EnvironmentSettings) -> dict[str, Any]:
    """Return the user's files as a host gets them."""
    found = {}
    for number, file in enumerate(settings.files):
        path = artifacts.local_path(file)
        try:
            text = artifacts.read_bytes(file).decode() if path is None else None
        except artifacts.ArtifactMissingError as error:
            raise EnvironmentUnusableError(f"has no file: {error}") from error
        found[file] = {"number": number, "file": str(path or file), "text": text}
    tools = [tool.rpartition(":") for tool in settings.tools]
    return {
        "python": settings.python and {**found[settings.python.file], "class": settings.python.class_name},
        "tools": [{**found[file], "function": function} for file, _, function in tools],
    }


def _below(process: int) -> list[int]:
    """Return a process and its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found = [process]
    for each in found:
        found += parents.get(each, [])
    return found


def _resident(process: int) -> int:
    """Return the bytes of memory that a process has for itself alone: an episode shares its host's."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{process}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return 0
