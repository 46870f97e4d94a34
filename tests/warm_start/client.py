"""What a test starts in place of Python: the server forks the process, which has this one's input and output, and this
one ends as that does. What the server does not know is left to Python itself.

    python -I -S client.py SOCKET EXECUTABLE PYTHON -m MODULE ARGUMENT ...

EXECUTABLE is what this program goes by, and what the process starts others with; PYTHON is the real one.
"""

import ctypes
import json
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
WARM = (
    "rlhfless_functions.learning.rank_process",
    "rlhfless_functions.serving.check_data",
    "rlhfless_functions.serving.fork_server",
    "rlhfless_operator",
    "tests.learning.gang_member",
    "tests.learning.leaving_rank",
    "tests.learning.moving_rank",
    "tests.training.altered_functions",
)
"""Modules that the server runs: they import torch, or start what does."""


def main() -> None:
    """Run until the process has ended."""
    path, executable, python, *arguments = sys.argv[1:]
    if arguments[:1] != ["-m"] or arguments[1] not in WARM:
        os.execv(python, [python, *arguments])
    # This process dies with its killed parent, and the server then kills the process that it forked.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = {
        "executable": executable,
        "module": arguments[1],
        "arguments": arguments[2:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 - pathlib would take longer than all the rest
        "leads_session": os.getsid(0) == os.getpid(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        status = int(connection.recv(16) or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
