"""The reaper: a process that owns everything that a reward starts, and ends all of it. Linux only.

The reaper forks the process that runs the reward. Then it only waits until that process ends or the parent closes the
lifeline. As a subreaper it becomes the parent of every orphan below it: double forks and new sessions do not escape. If
the parent is killed, that closes the lifeline too.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

_LISTS_CHILDREN = Path("/proc/thread-self/children").exists()

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def leave_network() -> bool:
    """Take the network from this process and its descendants, if the kernel permits it.

    Needs CAP_SYS_ADMIN or unprivileged user namespaces, and a process with one thread.
    """
    user, group = os.getuid(), os.getgid()
    if _libc.unshare(_CLONE_NEWNET) == 0:
        return True
    if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    # Without a mapping, the process would appear as user `nobody`. The mapping is optional.
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def hide() -> None:
    """Protect this process's memory and descriptors from other processes of the same user, and drop capabilities.

    A program that it starts can be inspected again, but has no capabilities.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.capset(ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)), bytes(24))


def children(parent: int) -> list[int]:
    """Return the process ids of the direct children of a process.

    The kernel may have a list for each thread, from which a child may be missing while another one ends. Otherwise all
    processes are looked at, which takes long where there are hundreds.
    """
    if not _LISTS_CHILDREN:
        return [each for each in _processes() if _parent(each) == parent]
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(process: int) -> int | None:
    with contextlib.suppress(OSError):
        # The name, in parentheses, may hold anything; the parent's id is the second field after it.
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def end_descendants() -> None:
    """Kill and reap every descendant of this process, which must adopt orphans."""
    while True:
        for child in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            # Reap all ended processes before the next round: there may be tens of thousands.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def keep(child: int, lifeline: socket.socket) -> int:
    """Wait for `child` to end or for the lifeline to close; then end all descendants.

    Returns:
        The child's wait status; that of SIGKILL if the lifeline was closed.
    """
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(wake, select.POLLIN)
    status: int | None = _reap(child)
    while status is None:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if lifeline.fileno() in ready:
            status = signal.SIGKILL
        else:
            os.read(wake, 512)
            status = _reap(child)
    end_descendants()
    return status


def end_like(status: int) -> None:
    """End this process in the same way as the child with this wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _reap(child: int) -> int | None:
    """Reap all ended processes. Returns the child's status if it was among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            if ended == child:
                found = status
    return found
