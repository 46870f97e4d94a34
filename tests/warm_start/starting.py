"""The server that tests have, and the program that stands for Python while it runs."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhfless_operator.platforms.local import fork_server

PYTHON = sys.executable
"""The real one, whatever `sys.executable` is by now."""
_HERE = Path(__file__).parent


@contextmanager
def start_server(folder: Path) -> Iterator[Path]:
    """Run the server.

    Args:
        folder: a new one, for its socket and the program.

    Returns:
        The program: it starts what Python starts, with the same arguments.
    """
    program, socket = folder / "python", folder / "socket"
    client = [PYTHON, "-I", "-S", _HERE / "client.py", socket, program, PYTHON]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, client))} "$@"\n')
    program.chmod(0o755)
    command = [PYTHON, "-m", "tests.warm_start.server", str(os.getpid()), str(socket)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=_HERE.parents[1],
        env={**os.environ, **fork_server._ENVIRONMENT},
        start_new_session=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the server has ended: its log says why"
        yield program
        server.kill()
