"""A process that has imported torch and forks the processes that tests start: each of them would import it for seconds.

    python -m tests.warm_start.server PARENT SOCKET

It says that it is ready, and ends with the process PARENT. What it forks has the input, output, environment and folder
of the client that asked, and is killed when that is gone.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rlhfless_functions.runtime.processes import die_with_parent

_IMPORTED = (
    "s3fs",
    "transformers.models.qwen3.modeling_qwen3",
    "rlhfless_functions.generation.engines.transformers",
    "rlhfless_functions.generation.stage",
    "rlhfless_functions.learning.learner",
    "rlhfless_functions.learning.team",
    "rlhfless_functions.preparation.stage",
    "rlhfless_functions.serving.emulation",
    "rlhfless_functions.serving.instance",
    "rlhfless_operator.cli",
    "rlhfless_operator.local.local_run",
)
"""What those that are forked find in memory."""
_LARGEST_REQUEST = 200_000
_TOLD_THEIR_PARENT = (
    "rlhfless_functions.learning.rank_process",
    "rlhfless_functions.serving.fork_server",
    "tests.training.altered_functions",
)
"""Modules whose first argument is the process that they are to end with."""


@dataclass
class Child:
    """A process, and the client that asked for it."""

    pid: int
    handle: int
    """A file descriptor that is readable once the process has ended."""
    client: socket.socket
    abandoned: bool = False
    """Whether the client is gone."""


def main(parent: str, path: str) -> None:
    """Fork until the parent dies."""
    die_with_parent(int(parent))
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    selector = selectors.DefaultSelector()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                child = key.data
                if child is None:
                    _fork(listener, selector)
                elif key.fileobj == child.handle:
                    _end(child, selector)
                elif not child.abandoned:
                    child.abandoned = True
                    selector.unregister(child.client)
                    signal.pidfd_send_signal(child.handle, signal.SIGKILL)


def _fork(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    client, _ = listener.accept()
    line, descriptors, _, _ = socket.recv_fds(client, _LARGEST_REQUEST, 3)
    if not line:  # It was killed before it had asked.
        client.close()
        return
    request, server = json.loads(line), os.getpid()
    pid = os.fork()
    if pid == 0:
        inherited = [client.fileno(), *(key.fd for key in selector.get_map().values())]
        _become(request, server, descriptors, inherited)
    for descriptor in descriptors:
        os.close(descriptor)
    child = Child(pid, os.pidfd_open(pid), client)
    selector.register(child.handle, selectors.EVENT_READ, child)
    selector.register(client, selectors.EVENT_READ, child)


def _end(child: Child, selector: selectors.BaseSelector) -> None:
    """A process has ended: so does its client."""
    _, status = os.waitpid(child.pid, 0)
    selector.unregister(child.handle)
    os.close(child.handle)
    if not child.abandoned:
        child.abandoned = True
        selector.unregister(child.client)
        with contextlib.suppress(OSError):
            child.client.send(str(os.waitstatus_to_exitcode(status)).encode())
    child.client.close()


def _become(request: dict[str, Any], server: int, descriptors: Sequence[int], inherited: Sequence[int]) -> NoReturn:
    """Be the program that was asked for.

    Args:
        request: the client's.
        server: process id of the server.
        descriptors: the client's input, output and errors.
        inherited: the server's own descriptors.
    """
    status = 1
    try:
        die_with_parent(server)
        for descriptor in inherited:
            os.close(descriptor)
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        if request["leads_session"]:
            os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.executable = request["executable"]
        module, arguments = request["module"], request["arguments"]
        if module in _TOLD_THEIR_PARENT:
            arguments[0] = str(server)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
