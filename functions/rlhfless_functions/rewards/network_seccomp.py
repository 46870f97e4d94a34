"""Block the network for a process and its descendants with a seccomp filter. Linux on x86-64 and ARM64.

It needs no privileges. So it works in a pod without capabilities, under the runtime's own seccomp profile and without
user namespaces (seccomp(2), struct seccomp_data; classic BPF as in linux/bpf_common.h).
"""

import ctypes
import errno
import platform
import socket
import struct
import sys
from dataclasses import dataclass

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM

_LOAD_WORD = 0x20
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_NOT_BELOW = 0x35
_RETURN = 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; for the first argument the lower half, because the kernel reads only that."""
_OTHER_CALLS = 0x40000000
"""The first number of x86-64's calls with short pointers (x32), which duplicate the other calls."""
_IO_URING_SETUP = 425
"""io_uring can create sockets without the call socket(2)."""


@dataclass(frozen=True)
class _Machine:
    architecture: int
    """AUDIT_ARCH_* of linux/audit.h."""
    socket: int
    """Number of the call socket(2)."""


_MACHINES = {"x86_64": _Machine(0xC000003E, 41), "aarch64": _Machine(0xC00000B7, 198)}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_sockets() -> bool:
    """Allow this single-threaded process and its descendants only Unix sockets. This can't be undone.

    Returns:
        Whether it worked; it does not if the kernel or the machine's architecture does not support it.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None or sys.platform != "linux":
        return False
    code = _filter(machine)
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    refused: int = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    return refused == 0


def _filter(machine: _Machine) -> bytes:
    # Each jump has two numbers: instructions to skip if its condition holds, and if not.
    instructions = (
        (_LOAD_WORD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 0, 7, machine.architecture),
        (_LOAD_WORD, 0, 0, _NUMBER),
        (_JUMP_IF_NOT_BELOW, 5, 0, _OTHER_CALLS),
        (_JUMP_IF_EQUAL, 4, 0, _IO_URING_SETUP),
        (_JUMP_IF_EQUAL, 0, 2, machine.socket),
        (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_IF_EQUAL, 0, 1, int(socket.AF_UNIX)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
