"""Linux process settings of functions: die with the parent, and show a name."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit immediately if it is dead already.

    A fork clears the request, so every child must call this itself. It does nothing on systems other than Linux.

    Args:
        parent: process id of the parent.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """Show this process under `name` (its first 15 bytes) in `ps` and `top`. Otherwise all forks have the same name."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
