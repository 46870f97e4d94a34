"""Die with the parent process, so that `kill -9` of a driver leaves nothing behind (Linux)."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit at once if it has died already.

    A fork clears the request, so every child asks for itself. Elsewhere than on Linux this does nothing.

    Args:
        parent: process id of the parent.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
