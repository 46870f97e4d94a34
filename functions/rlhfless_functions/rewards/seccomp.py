"""Filters of system calls (seccomp(2)) for code that the model writes. Linux on x86-64 and ARM64.

They need no privileges. So they work in a pod without capabilities, under the runtime's own seccomp profile and without
user namespaces. A refused call fails with EPERM, so honest code sees a normal exception.

`refusals` is for a whole worker: nothing in it may reach out of the file system's rules. `watch` is for one program: a
keeper is asked before each fork, and the rest makes up for what Landlock lacks on this machine. Classic BPF as in
linux/bpf_common.h; the numbers are those of arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_ASK = 0x7FC00000
"""SECCOMP_RET_USER_NOTIF: who holds the filter's listener decides."""
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN = 0x00050000 | errno.ENOSYS
"""Refuses calls whose arguments are in memory, which a filter can't read: libraries take the older call instead."""
_ASKS_SINCE = (5, 5)
"""The first kernel that lets a call continue after the answer."""

_LOAD_WORD = 0x20
_AND = 0x54
_RETURN = 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data; of each argument of eight bytes the lower half, since the kernel reads only that."""
_OTHER_CALLS = 0x40000000
"""The first number of x86-64's calls with short pointers (x32), which duplicate the other calls."""


class _If(IntEnum):
    EQUAL = 0x15
    NOT_BELOW = 0x35
    ANY_BIT = 0x45


_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH_* of linux/audit.h, and the column of the numbers below."""

# Each call has its numbers on x86-64 and ARM64; None where it does not exist.
Call = tuple[int | None, int | None]
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
_SHARED_MEMORY: tuple[Call, ...] = ((29, 194), (30, 196), (31, 195), (67, 197))
_SEMAPHORES: tuple[Call, ...] = ((64, 190), (65, 193), (66, 191), (220, 192))
_MESSAGES: tuple[Call, ...] = ((68, 186), (69, 189), (70, 188), (71, 187))
_POSIX_QUEUES: tuple[Call, ...] = ((240, 180), (241, 181))
_KEYRINGS: tuple[Call, ...] = ((248, 217), (249, 218), (250, 219))
_IO_URING: tuple[Call, ...] = ((425, 425), (426, 426), (427, 427))
_MEMORY_FILES: tuple[Call, ...] = ((319, 279), (447, 447), (323, 282))
"""memfd_create, memfd_secret and userfaultfd: memory that no limit counts."""
_OTHER_PROCESSES: tuple[Call, ...] = (
    (101, 117), (310, 270), (311, 271), (312, 272), (438, 438), (440, 440), (448, 448), (256, 238), (279, 239),
)  # fmt: skip
"""ptrace, process_vm_readv and _writev, kcmp, pidfd_getfd, process_madvise and _mrelease, migrate_ and move_pages."""
_KERNEL: tuple[Call, ...] = ((321, 280), (298, 241), (300, 262), (304, 265))
"""bpf, perf_event_open, fanotify_init, open_by_handle_at."""
_MOUNTS: tuple[Call, ...] = (
    (165, 40), (166, 39), (155, 41), (161, 51), *((number, number) for number in (428, 429, 430, 431, 432, 433, 442)),
    (272, 97), (308, 268),
)  # fmt: skip
"""mount, umount2, pivot_root, chroot, the new mount calls; unshare and setns."""
_ATTRIBUTES: tuple[Call, ...] = (
    (90, None), (91, 52), (268, 53), (452, 452), (92, None), (93, 55), (94, None), (260, 54), (132, None), (235, None),
    (261, None), (280, 88), (188, 5), (189, 6), (190, 7), (197, 14), (198, 15), (199, 16), (463, 463), (466, 466),
    (468, 468),
)  # fmt: skip
"""chmod, chown, utime, setxattr and their kind, about which Landlock has no rules."""
_CLONE, _CLONE3, _FORK, _VFORK = (56, 220), (435, 435), (57, None), (58, None)
_NAMESPACES = 0x7E020000
"""CLONE_NEW*."""
_KILLS: tuple[Call, ...] = ((62, 129), (200, 130), (234, 131), (129, 138), (297, 240))
"""kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo."""
_PIDFD_SEND_SIGNAL = (424, 424)
_FCNTL, _IOCTL, _PRCTL = (72, 25), (16, 29), (157, 167)
_TRUNCATE = (76, 45)
_WRITING_CALLS: tuple[Call, ...] = (
    (85, None), _TRUNCATE, (82, None), (264, 38), (316, 276), (86, None), (265, 37), (88, None), (266, 36), (87, None),
    (263, 35), (83, None), (258, 34), (84, None), (133, None), (259, 33),
)  # fmt: skip
"""creat, truncate, rename, link, symlink, unlink, mkdir, rmdir, mknod and their kind."""
_OPEN, _OPENAT, _OPENAT2 = (2, None), (257, 56), (437, 437)
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class _Rule:
    """An action for a call, or for a call whose argument meets a condition."""

    call: Call
    action: int = _REFUSE
    argument: int | None = None
    condition: _If = _If.EQUAL
    value: int = 0
    mask: int = 0xFFFFFFFF
    """The bits of the argument that count."""
    unless: bool = False
    """True if the action is for all but the calls that meet the condition."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install(code: bytes) -> bool:
    """Filter the calls of this single-threaded process and its descendants. This can't be undone.

    Returns:
        Whether it worked; it does not if the kernel does not support it, or the code is empty.
    """
    if not code:
        return False
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    refused: int = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    return refused == 0


def refusals() -> bytes:
    """Return the filter that refuses the network, and whatever reaches other processes or outlives its own; empty on
    machines of other kinds. Of sockets it leaves pairs, which connect relatives."""
    refused = (
        *_SHARED_MEMORY, *_SEMAPHORES, *_MESSAGES, *_POSIX_QUEUES, *_KEYRINGS, *_IO_URING, *_MEMORY_FILES,
        *_OTHER_PROCESSES, *_KERNEL, *_MOUNTS, _SOCKET,
    )  # fmt: skip
    rules = [_Rule(call) for call in refused]
    rules += [
        _Rule(_SOCKETPAIR, argument=0, value=int(socket.AF_UNIX), unless=True),
        _Rule(_CLONE, argument=0, condition=_If.ANY_BIT, value=_NAMESPACES),
        _Rule(_CLONE3, _UNKNOWN),
        # Limits, priorities and cores of others: prlimit64, setpriority, ioprio_set and the kinds of sched_set.
        *(
            _Rule(call, argument=0, value=0, unless=True)
            for call in ((302, 261), (203, 122), (142, 118), (144, 119), (314, 274), (141, 140))
        ),
        _Rule((141, 140), argument=1, value=0, unless=True),
        _Rule((251, 30), argument=0, value=1, unless=True),
        _Rule((251, 30), argument=1, value=0, unless=True),
        # F_SETOWN, F_SETSIG, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP, TIOCSTI: signals and input for others.
        *(_Rule(_FCNTL, argument=1, value=command) for command in (8, 10, 15)),
        *(_Rule(_IOCTL, argument=1, value=command) for command in (0x8901, 0x8902, 0x5412)),
    ]
    return _assembled(rules)


def watch(*, files: bool, truncation: bool, signals: bool, asks: bool) -> bytes:
    """Return the filter of one program, whose keeper is asked before each fork; empty on machines of other kinds.

    Args:
        files: whether Landlock confines its files. If not, it may write none.
        truncation: whether Landlock's rules are about shortening files, too.
        signals: whether Landlock confines its signals. If not, the keeper is asked before each.
        asks: whether there is a keeper who can be asked. If not, forks pass, and signals are refused.
    """
    # PR_SET_DUMPABLE would hide its open files from the keeper, which counts them.
    rules = [_Rule(call) for call in _ATTRIBUTES]
    rules.append(_Rule(_PRCTL, argument=0, value=4))
    if asks:
        rules += [_Rule(_CLONE3, _UNKNOWN), *(_Rule(call, _ASK) for call in (_CLONE, _FORK, _VFORK))]
    if not files:
        rules += [_Rule(call) for call in _WRITING_CALLS]
        rules += [
            _Rule(_OPEN, argument=1, condition=_If.ANY_BIT, value=_TO_WRITE),
            _Rule(_OPENAT, argument=2, condition=_If.ANY_BIT, value=_TO_WRITE),
            _Rule(_OPENAT2, _UNKNOWN),
        ]
    elif not truncation:
        only = os.O_TRUNC | os.O_ACCMODE
        rules += [
            _Rule(_TRUNCATE),
            _Rule(_OPEN, argument=1, value=os.O_TRUNC, mask=only),
            _Rule(_OPENAT, argument=2, value=os.O_TRUNC, mask=only),
            _Rule(_OPENAT2, _UNKNOWN),
        ]
    if not signals:
        rules.append(_Rule(_PIDFD_SEND_SIGNAL))
        rules += [_Rule(call, _ASK if asks else _REFUSE) for call in _KILLS]
    return _assembled(rules)


def asks() -> bool:
    """Return whether this kernel can let another process decide about a call."""
    if platform.machine() not in _MACHINES:
        return False
    release = platform.release().split("-")[0].split(".")
    return tuple(int(part) for part in release[:2] if part.isdigit()) >= _ASKS_SINCE


def _assembled(rules: Iterable[_Rule]) -> bytes:
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return b""
    architecture, column = _MACHINES[platform.machine()]
    # Each jump has two numbers: instructions to skip if its condition holds, and if not.
    code = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE),
        (_If.EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD_WORD, 0, 0, _NUMBER),
        (_If.NOT_BELOW, 0, 1, _OTHER_CALLS),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for rule in rules:
        number = rule.call[column]
        if number is None:
            continue
        if rule.argument is None:
            code += [(_If.EQUAL, 0, 1, number), (_RETURN, 0, 0, rule.action)]
            continue
        skips = (1, 0) if rule.unless else (0, 1)
        code += [
            (_If.EQUAL, 0, 5, number),
            (_LOAD_WORD, 0, 0, _ARGUMENTS + 8 * rule.argument),
            (_AND, 0, 0, rule.mask),
            (rule.condition, *skips, rule.value),
            (_RETURN, 0, 0, rule.action),
            (_LOAD_WORD, 0, 0, _NUMBER),
        ]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
