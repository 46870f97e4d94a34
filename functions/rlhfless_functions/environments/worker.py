"""A host of episodes: `python -m rlhfless_functions.environments.worker CONNECTION LIFELINE MEMORY`.

The host runs the user's files once, and forks a process for each episode: it begins in a moment, shares the memory of
what the files imported, and ends alone. Two keepers (`rewards.reaper`) end everything: one for the host, which ends
with its lifeline, and one for each episode, which ends with that episode's.

The host reads a setup frame and answers it. After that, each byte on CONNECTION comes with two descriptors: the
episode's own connection and lifeline. An episode answers each request with a frame of JSON.
"""

import contextlib
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from rlhfless_functions.environments.results import cut
from rlhfless_functions.environments.schemas import schemas
from rlhfless_functions.environments.user_code import EnvironmentFaultError, Episode, UserCode, load
from rlhfless_functions.rewards import reaper
from rlhfless_functions.rewards.calls import describe
from rlhfless_functions.rewards.channel import receive, send
from rlhfless_functions.rewards.code.folders import remove
from rlhfless_functions.rewards.source import SourceError
from rlhfless_functions.runtime.processes import die_with_parent

_REAP_SECONDS = 1.0
"""Seconds between two looks for processes that have ended."""


def main() -> None:
    """Fork the host, and become its keeper."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    lifeline = socket.socket(fileno=int(sys.argv[2]))
    memory = int(sys.argv[3])
    reaper.adopt_orphans()
    scratch = tempfile.mkdtemp(prefix="rlhfless-environment-")
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(keeper)
        lifeline.close()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            _host(connection, memory, Path(scratch))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    connection.close()
    status = reaper.keep(child, lifeline)
    with contextlib.suppress(OSError):
        remove(Path(scratch))
    reaper.end_like(status)


def _host(connection: socket.socket, memory: int, scratch: Path) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    frame = receive(connection)
    if frame is None:
        return
    setup = pickle.loads(frame)
    try:
        code = load(setup["python"], setup["tools"], scratch)
        found = schemas(code, setup["kept"])
    except SourceError as error:
        _answer(connection, {"ready": False, "error": str(error)})
        return
    except BaseException as error:
        _answer(connection, {"ready": False, "error": f"cannot be loaded: it {describe(error)}"})
        return
    gc.collect()
    gc.freeze()
    _answer(connection, {"ready": True, "schemas": found, "game": code.is_game})
    while True:
        # Until it is reaped, an ended process counts against the limit of a pod's processes.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not select.select([connection], [], [], _REAP_SECONDS)[0]:
            continue
        byte, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        if not byte or len(descriptors) != 2:
            return
        _begin(code, connection, *descriptors, memory=memory, longest=setup["result_bytes"])


def _begin(code: UserCode, host: socket.socket, own: int, life: int, *, memory: int, longest: int) -> None:
    """Fork the keeper of an episode, which forks the episode."""
    connection, lifeline = socket.socket(fileno=own), socket.socket(fileno=life)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            host.close()
            die_with_parent(parent)
            os.setsid()
            reaper.adopt_orphans()
            keeper = os.getpid()
            child = os.fork()
            if child == 0:
                die_with_parent(keeper)
                lifeline.close()
                resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for it any more
                    _play(code, connection, keeper, longest)
                os._exit(0)
            connection.close()
            status = reaper.keep(child, lifeline)
            with contextlib.suppress(OSError):
                lifeline.sendall(f"{status}".encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    connection.close()
    lifeline.close()


def _play(code: UserCode, connection: socket.socket, keeper: int, longest: int) -> None:
    home = os.getpid()
    _answer(connection, {"keeper": keeper})
    episode: Episode | None = None
    while (frame := receive(connection)) is not None:
        request = pickle.loads(frame)
        try:
            if request["do"] == "begin":
                episode = Episode(code, request["seed"])
            assert episode is not None
            answer = _done(episode, request, longest)
        except EnvironmentFaultError as error:
            answer = {"error": str(error)}
        except BaseException as error:
            answer = {"error": describe(error)}
        if os.getpid() != home:
            # The user's code forked, and this is the child, which must not answer again.
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(connection, answer)


def _done(episode: Episode, request: dict[str, Any], longest: int) -> dict[str, Any]:
    if request["do"] == "begin":
        return {"text": _cut(episode.begin(request["row"]), longest)}
    if request["do"] == "call":
        answer = episode.call(request["name"], request["arguments"])
        return {name: _cut(value, longest) for name, value in answer.items()}
    if request["do"] == "step":
        answer = episode.step(request["text"])
        return {**answer, "text": _cut(answer["text"], longest)}
    return {"score": episode.score()}


def _cut(text: str | None, longest: int) -> str | None:
    return None if text is None else cut(text, longest)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    send(connection, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
