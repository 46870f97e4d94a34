"""Keeps the processes of one program: permits each fork before it happens, and ends all of them. Stands alone, like
`runner`.

The runner forks: the child is confined and runs the program, the parent is its keeper. The keeper adopts the program's
orphans, so whatever the program starts is below it. It ends everything with the program's first process, on SIGTERM, or
if the program takes more than it may. Then it ends as the program did.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import time

NOT_BEGUN = 78
"""Exit code if the program could not begin: it says nothing of the code. A program can't exit with it."""
MOST_TASKS = 64
"""Processes and threads that a program may have at a time."""
_MOST_FILES = 10_000
_MOST_BYTES = 2**28
"""The most that a program may have in its folder."""
_LOOK = 0.25
"""Seconds between looks at its folder."""
_MEMORY_LOOK = 0.1
"""Seconds between looks at its memory."""

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_RESTRICT_SELF = 446
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_KILLS = {"x86_64": {62, 200, 234, 129, 297}, "aarch64": {129, 130, 131, 138, 240}}
_NOTIF_RECEIVE, _NOTIF_SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_BEGINS = b"."
_QUESTION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")

_libc = ctypes.CDLL(None, use_errno=True)
_machine = os.uname().machine


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def split(ruleset: int, code: bytes, *, asks: bool, close: tuple[int, ...], memory: int, out_of_memory: int) -> None:
    """Fork. Returns in the child, which is confined; the parent keeps it, and ends with it.

    Args:
        ruleset: descriptor of Landlock's rules; -1 without.
        code: the seccomp filter; empty without.
        asks: whether the filter asks the keeper.
        close: descriptors of the child alone.
        memory: bytes that all of the program's processes may have together.
        out_of_memory: exit code if they have more.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    keepers, childs = socket.socketpair()
    child = os.fork()
    if child == 0:
        keepers.close()
        _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        os.setpgid(0, 0)
        with childs:
            _confine(ruleset, code, childs, asks=asks)
        return
    has_begun = False
    try:
        childs.close()
        if ruleset >= 0:
            os.close(ruleset)
        for descriptor in (0, 1, *close):
            os.close(descriptor)
        begins, descriptors, _, _ = socket.recv_fds(keepers, 1, 1)
        if has_begun := begins == _BEGINS:
            _Keeper(child, memory, out_of_memory).keep(descriptors[0] if descriptors else -1)
    finally:
        _end_descendants()
        if has_begun:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(NOT_BEGUN)


def _confine(ruleset: int, code: bytes, keeper: socket.socket, *, asks: bool) -> None:
    """Take from this process what it may not do. What the machine lacks was left out of the arguments."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if ruleset >= 0:
        _checked(_libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0))
        os.close(ruleset)
    if code:
        program = ctypes.byref(_Program(len(code) // 8, code))
        flags = _NEW_LISTENER if asks else 0
        listener = _checked(_libc.syscall(_SECCOMP[_machine], _SET_MODE_FILTER, flags, program))
        if asks:
            # From here on each fork waits for the keeper.
            socket.send_fds(keeper, [_BEGINS], [listener])
            os.close(listener)
            return
    keeper.send(_BEGINS)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class _Keeper:
    def __init__(self, child: int, memory: int, out_of_memory: int) -> None:
        self._child = child
        self._memory = memory
        self._out_of_memory = out_of_memory << 8
        self._status: int | None = None
        self._told = False
        self._known = 0
        self._permitted = 0
        self._poll = select.poll()
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        self._woken = woken
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._be_told)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._poll.register(woken, select.POLLIN)

    def _be_told(self, *_: object) -> None:
        self._told = True

    def keep(self, listener: int) -> None:
        """Wait for the program's end; then end all of it, and this process like it.

        Args:
            listener: descriptor of the filter's questions; -1 if it asks none.
        """
        if listener >= 0:
            self._poll.register(listener, select.POLLIN)
        self._reap()
        look = memory_look = time.monotonic()
        while self._status is None:
            if self._told:
                self._reap()
                self._status = self._status or 0
                break
            for descriptor, event in self._poll.poll(1000 * _MEMORY_LOOK):
                if descriptor == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 512)
                    self._reap()
                elif descriptor == listener and event & select.POLLIN:
                    self._decide(listener)
                elif descriptor == listener:
                    self._poll.unregister(listener)
            if self._status is None and time.monotonic() >= memory_look:
                if _has_more(self._memory):
                    self._status = self._out_of_memory
                memory_look = time.monotonic() + _MEMORY_LOOK
            if self._status is None and time.monotonic() >= look:
                if _too_much_written():
                    self._status = signal.SIGKILL
                look = time.monotonic() + _LOOK
        _end_descendants()
        if os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        code = os.waitstatus_to_exitcode(self._status) & 0xFF
        os._exit(1 if code == NOT_BEGUN else code)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    self._status = ended[1]

    def _decide(self, listener: int) -> None:
        """Answer one question of the filter; end everything if the program has too many processes."""
        question = ctypes.create_string_buffer(_QUESTION.size)
        if _libc.ioctl(listener, ctypes.c_ulong(_NOTIF_RECEIVE), question) < 0:
            return  # The process that asked has ended.
        number, _, _, call, _, _, *arguments = _QUESTION.unpack(question.raw)
        error = 0
        if call in _KILLS[_machine]:
            error = 0 if _is_within(arguments[0] & 0xFFFFFFFF) else -1  # EPERM
        elif self._is_full():
            self._status = signal.SIGKILL
            return
        answer = _ANSWER.pack(number, 0, error, 0 if error else _CONTINUE)
        _libc.ioctl(listener, ctypes.c_ulong(_NOTIF_SEND), answer)

    def _is_full(self) -> bool:
        """Count a fork. The exact count is taken only when there may be too many."""
        if self._known + self._permitted >= MOST_TASKS:
            self._known, self._permitted = sum(_descendants().values()), 0
            if self._known >= MOST_TASKS:
                return True
        self._permitted += 1
        return False


def _is_within(target: int) -> bool:
    """Return whether a signal for this process id or group stays in the program."""
    if target == 0:
        return True  # The program's own group.
    if target >= 2**31:
        target = 2**32 - target
    return target in _descendants()


def _descendants() -> dict[int, int]:
    """Return the living descendants of this process, with the number of threads of each."""
    parents: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of names, at each look
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - the same
                fields = file.read().rpartition(b")")[2].split()
                parents[int(name)] = int(fields[1]), int(fields[17])
    found: dict[int, int] = {}
    newest = [os.getpid()]
    while newest:
        newest = [pid for pid, (parent, _) in parents.items() if parent in newest]
        found.update((pid, parents[pid][1]) for pid in newest)
    return found


def _end_descendants() -> None:
    """Kill and reap every descendant. They can't fork meanwhile, because nobody permits it."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _has_more(most: int) -> bool:
    """Return whether the program's processes have more bytes of memory together.

    Pages that a process shares with its forks count once, which takes the kernel longer to tell. So this is asked only
    if there may be too many. A process that hides how it shares its pages has all of them.
    """
    pids = _descendants()
    if sum(map(_resident, pids)) <= most:
        return False
    # One that has ended has neither.
    return (
        sum(_bytes_in(f"/proc/{pid}/smaps_rollup", b"Pss_Anon", b"Pss_Shmem") or _resident(pid) for pid in pids) > most
    )


def _resident(pid: int) -> int:
    return _bytes_in(f"/proc/{pid}/status", b"RssAnon", b"RssShmem")


def _bytes_in(file: str, *names: bytes) -> int:
    """Return the sum of sizes that a file of /proc tells; 0 if it tells none."""
    with contextlib.suppress(OSError), open(file, "rb") as lines:  # noqa: PTH123 - at each look
        return sum(int(line.split()[1]) << 10 for line in lines if line.partition(b":")[0] in names)
    return 0


def _too_much_written() -> bool:
    """Return whether the working folder, or open files that are in no folder, hold more than a program may write."""
    files, size = 0, 0
    folders = ["."]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > _MOST_FILES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        pass  # It is at work there.
    except OSError as error:
        if error.errno != 13:
            return True  # A path that is too long to look at.
    return size + _nowhere() > _MOST_BYTES


def _nowhere() -> int:
    """Return the bytes of the program's open files that are in no folder."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in _descendants():
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{name}")  # noqa: PTH116
                    if found.st_nlink == 0:
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())
