"""A reward worker: `python -m rlhfless_functions.rewards.worker SOCKET LIFELINE KIND MEMORY`.

Two processes: the reaper (this one, see `reaper`) and its child, which runs the reward in its main thread. The child
reads one setup frame and answers `ready`, then reads requests and answers each of their groups with a frame. SOCKET
and LIFELINE are descriptors of stream sockets, KIND is the reward's kind, MEMORY the limit of each process in bytes.
"""

import asyncio
import contextlib
import json
import os
import pickle
import resource
import socket
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhfless_functions.rewards import reaper, seccomp
from rlhfless_functions.rewards.calls import Scorer, answer_in_turn, answer_together, describe, event_loop, is_async
from rlhfless_functions.rewards.channel import receive, send
from rlhfless_functions.rewards.code.folders import remove
from rlhfless_functions.rewards.source import SourceError, load_function
from rlhfless_functions.runtime.processes import die_with_parent


def main() -> None:
    """Fork, and become the reaper."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    lifeline = socket.socket(fileno=int(sys.argv[2]))
    kind, memory = sys.argv[3], int(sys.argv[4])
    reaper.adopt_orphans()
    # The reaper removes it, because the child may be killed at any moment.
    scratch = tempfile.mkdtemp(prefix="rlhfless-reward-") if kind in ("code", "python") else None
    keeper_id = os.getpid()
    child = os.fork()
    if child == 0:
        filtered = False
        if kind == "code":
            reaper.adopt_orphans()
            reaper.leave_network()
            filtered = seccomp.install(seccomp.refusals())
            reaper.hide()
        die_with_parent(keeper_id)
        lifeline.close()
        _limit(memory)
        try:
            _serve(connection, kind, scratch, filtered=filtered)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kind == "code":
        reaper.hide()
    connection.close()
    status = reaper.keep(child, lifeline)
    if scratch is not None:
        with contextlib.suppress(OSError):
            remove(Path(scratch))
    reaper.end_like(status)


def _limit(memory: int) -> None:
    # RLIMIT_DATA counts private writable memory, not address space that libraries reserve and never use.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(connection: socket.socket, kind: str, scratch: str | None, *, filtered: bool) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    setup = receive(connection)
    if setup is None:
        return
    try:
        lacking: list[str] = []
        if kind == "code":
            scorer, lacking = _code_scorer(pickle.loads(setup), str(scratch), filtered=filtered)
            concurrent = False
        else:
            scorer, concurrent = _scorer(kind, pickle.loads(setup), scratch)
    except SourceError as error:
        _answer(connection, {"ready": False, "error": str(error)})
        return
    except BaseException as error:
        _answer(connection, {"ready": False, "error": f"cannot be loaded: it {describe(error)}"})
        return
    _answer(connection, {"ready": True, "concurrent": concurrent, "lacking": lacking})
    if concurrent:
        event_loop().run_until_complete(_serve_together(connection, scorer))
        return
    while (frame := receive(connection)) is not None:
        request = pickle.loads(frame)
        for answer in answer_in_turn(scorer, request["groups"], request["progress"]):
            _answer(connection, answer)


async def _serve_together(connection: socket.socket, scorer: Scorer) -> None:
    """Answer requests in one event loop, which runs between them, too."""
    with ThreadPoolExecutor(1) as reader:
        while (frame := await asyncio.get_running_loop().run_in_executor(reader, receive, connection)) is not None:
            request = pickle.loads(frame)
            async for answer in answer_together(scorer, request["groups"], request["progress"], request["seconds"]):
                _answer(connection, answer)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    send(connection, json.dumps(answer).encode())


def _scorer(kind: str, setup: dict[str, Any], scratch: str | None) -> tuple[Scorer, bool]:
    """Return the reward, and whether to await it for many groups at once. Import only what the kind needs."""
    if kind == "python":
        from rlhfless_functions.rewards.callables import scorer_of

        function = load_function(setup["file"], setup["function"], Path(str(scratch)), setup["text"])
        return scorer_of(function, setup["style"]), is_async(function)
    if kind == "http":
        from rlhfless_functions.rewards.remote import remote_scorer

        return remote_scorer(setup["url"], setup["attempt_seconds"]), True
    if kind == "math":
        from rlhfless_functions.rewards.mathematics.scorer import math_scorer

        return math_scorer(setup["require_end"], setup["timeout"]), False

    from rlhfless_functions.rewards.matching import exact_match_scorer, format_scorer

    if kind == "exact_match":
        return exact_match_scorer(setup["pattern"], setup["require_end"], setup["timeout"]), False
    return format_scorer(setup["pattern"], setup["timeout"]), False


def _code_scorer(setup: dict[str, Any], scratch: str, *, filtered: bool) -> tuple[Scorer, list[str]]:
    """Return the reward, and what this machine lacks to confine the code."""
    from rlhfless_functions.rewards.code.confinement import lacking
    from rlhfless_functions.rewards.code.scoring import code_scorer, usable_confinement

    confinement = usable_confinement(setup["memory"], scratch)
    scorer = code_scorer(setup["tests_column"], setup["seconds"], setup["memory"], scratch, confinement)
    return scorer, lacking(confinement, filtered=filtered)


if __name__ == "__main__":
    main()
