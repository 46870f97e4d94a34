# ruff: noqa: E501 - the programs are easier to read on one line
"""Hostile programs as responses: each attack in each way. Nothing outside changes, no process is left, nobody else's
score changes, and the job goes on.

The worker runs with all that the machine has, and as on a kernel without Landlock. `docs/security.md` says what holds.
"""

import hashlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import rlhfless_functions.rewards.code
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer, Scores
from rlhfless_functions.runtime import landlock
from rlhfless_functions.settings import CodeReward, RewardSettings, SamplingSettings

TOKEN = f"hostile-{secrets.token_hex(4)}"
KEY = secrets.randbits(30)
"""Of memory and semaphores that the programs share with everybody, if they can."""
PACKAGE = Path(rlhfless_functions.rewards.code.__file__).parent
PACKAGES = Path(pytest.__file__).parent.parent
ECHO = [{"input": "1", "output": "1"}]
RIGHT = "print(input())"

# Where a program writes: a file that may exist, in a folder that does. VICTIM is a folder of somebody else.
TARGETS = {
    "an artifact": "VICTIM + '/artifacts/manifest.json'",
    "a new artifact": "VICTIM + '/artifacts/new'",
    "a user's file": "VICTIM + '/home/.bashrc'",
    "the judge's folder": f"'{PACKAGE}/{TOKEN}.py'",
    "the packages": f"'{PACKAGES}/{TOKEN}.txt'",
    "shared memory": f"'/dev/shm/{TOKEN}'",
    "the folder of all programs": f"'../{TOKEN}'",
    "a neighbour's program": "next((p for p in glob.glob('../*/solution.py') if not os.path.samefile(p, 'solution.py')), '../x/y')",
}
WAYS = {
    "opens it to write": "open(target, 'w').write('x')",
    "appends": "open(target, 'a').write('x')",
    "changes it in place": "open(target, 'r+').write('x')",
    "empties it": "os.close(os.open(target, os.O_RDONLY | os.O_TRUNC))",
    "truncates it by its path": "os.truncate(target, 0)",
    "creates it exclusively": "os.close(os.open(target + '.x', os.O_CREAT | os.O_EXCL))",
    "removes it": "os.unlink(target)",
    "removes the folder": "shutil.rmtree(os.path.dirname(target))",
    "renames it": "os.rename(target, target + '.moved')",
    "takes it away": "os.rename(target, 'taken')",
    "puts a file in its place": "open('mine', 'w').write('x'); os.replace('mine', target)",
    "links to it": "os.link(target, 'linked'); open('linked', 'w').write('x')",
    "links it out": "open('mine', 'w').write('x'); os.link('mine', target + '.link')",
    "writes through a link": "os.symlink(target, 'way'); open('way', 'w').write('x')",
    "makes a link": "os.symlink('/etc/passwd', target + '.link')",
    "makes a folder": "os.mkdir(target + '.folder')",
    "makes a pipe": "os.mkfifo(target + '.pipe')",
    "closes it to its owner": "os.chmod(target, 0)",
    "closes it through a descriptor": "os.fchmod(os.open(target, os.O_RDONLY), 0)",
    "gives it away": "os.chown(target, 12345, 12345)",
    "ages it": "os.utime(target, (0, 0))",
    "marks it": "os.setxattr(target, 'user.x', b'x')",
    "asks a shell": "subprocess.run(['/bin/sh', '-c', 'echo x > ' + target])",
    "asks a child that has left": "os.fork() or (os.setsid(), os.fork() or open(target, 'w').write('x'), os._exit(0))",
    "calls the kernel": "libc.syscall(257 if x86 else 56, -100, target.encode(), 0o1101, 0o600)",
    "goes through /proc": "open('/proc/self/root' + os.path.abspath(target), 'w').write('x')",
}
HEAD = """
import ctypes, glob, mmap, os, resource, shutil, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
VICTIM, PID = {victim!r}, {pid}
"""
WRITES = "target = {target}\ntry:\n    {way}\nexcept BaseException:\n    pass\nprint(input())\n"

# What a program does to other processes, whose ids it gets; it may be ended for it.
DEEDS = {
    "kills its parents": "os.kill(os.getppid(), 9)",
    "stops its parents": "os.kill(os.getppid(), signal.SIGSTOP)",
    "kills all": "os.kill(-1, 9)",
    "kills all by name": "for p in os.listdir('/proc'):\n        p.isdigit() and int(p) != os.getpid() and kill(int(p))",
    "kills the victim": "kill(PID)",
    "kills the victim's group": "os.killpg(os.getpgid(PID), 9)",
    "stops the victim": "os.kill(PID, signal.SIGSTOP)",
    "kills a thread": "libc.syscall(200 if x86 else 130, PID, 9)",
    "kills by a descriptor": "signal.pidfd_send_signal(os.pidfd_open(PID), 9)",
    "queues a signal": "libc.syscall(129 if x86 else 138, PID, 9, b'\\0' * 128)",
    "limits the victim": "resource.prlimit(PID, resource.RLIMIT_CPU, (0, 0))",
    "slows the victim": "os.setpriority(os.PRIO_PROCESS, PID, 19)",
    "slows its group": "os.setpriority(os.PRIO_PGRP, os.getpgid(PID), 19)",
    "slows its user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "moves the victim": "os.sched_setaffinity(PID, [min(os.sched_getaffinity(0))])",
    "reschedules the victim": "os.sched_setscheduler(PID, os.SCHED_IDLE, os.sched_param(0))",
    "traces the victim": "libc.ptrace(16, PID, 0, 0)",
    "leaves a child": "if os.fork() == 0: time.sleep(600)",
    "leaves a session": "if os.fork() == 0: os.setsid(); os.fork(); time.sleep(600)",
    "leaves an orphan": "if os.fork() == 0:\n        os.setsid()\n        os.fork() and os._exit(0)\n        time.sleep(600)",
    "leaves a shell": "subprocess.Popen(['/bin/sh', '-c', 'nohup sleep 600 & disown'], start_new_session=True)",
    "leaves a spawned one": "os.posix_spawn('/bin/sleep', ['sleep', '600'], {}, setsid=True)",
    "leaves one that ignores signals": "if os.fork() == 0:\n        signal.signal(15, signal.SIG_IGN)\n        time.sleep(600)",
    "leaves threads": "for _ in range(9): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "forks without end": "while True: os.fork()",
    "forks and goes": "while True: os.fork() and os._exit(0)",
    "forks and hides": "while True:\n        try: os.fork() or os.setsid()\n        except OSError: pass",
    "starts shells": "while True: subprocess.Popen([sys.executable, '-c', 'import os\\nwhile 1: os.fork()'])",
    "starts threads without end": "threading.stack_size(2**16)\n    while True: threading.Thread(target=time.sleep, args=(600,)).start()",
    "fills the disk": "for n in range(9): open(str(n), 'wb').write(bytes(2**26 - 1))\n    time.sleep(600)",
    "fills it without a name": "for n in range(9):\n        f = open('f', 'wb'); os.unlink('f'); f.write(bytes(2**26 - 1)); globals()[str(n)] = f\n    time.sleep(600)",
    "makes files without end": "n = 0\n    while True: open(str(n), 'w').close(); n += 1",
    "makes deep folders": "while True: os.mkdir('d'); os.chdir('d')",
    "makes closed folders": "os.makedirs('a/b/c'); os.umask(0o777); os.makedirs('a/d/e')",
    "prints without end": "while True: print('x' * 10**6)",
    "prints much": "print('x' * (2**26 - 9))",
    "fills the memory": "x = [bytearray(2**20) for _ in range(10**6)]",
    "fills shared memory": "x = [mmap.mmap(-1, 2**26) for _ in range(99)]\n    for m in x: m.write(b'x' * 2**26)",
    "links its output to zeros": "for n in ('output', 'input', 'solution.py', 'before.py'): os.path.exists(n) and os.unlink(n); os.symlink('/dev/zero', n)",
    "makes its output a pipe": "for n in ('output', 'input'): os.path.exists(n) and os.unlink(n); os.mkfifo(n)",
    "removes its folder": "shutil.rmtree(os.getcwd())",
    "moves its folder": "os.rename(os.getcwd(), os.getcwd() + '.moved')",
    "opens files without end": "x = [os.open('/dev/null', 0) for _ in range(10**6)]",
    "closes all": "os.closerange(0, 9999)",
    "writes to all": "for n in range(1, 256):\n        try: os.write(n, b'passed 0\\nend\\n')\n        except OSError: pass",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "crashes": "ctypes.string_at(0)",
}  # fmt: skip
DOES = "def kill(p):\n    try: os.kill(p, 9)\n    except OSError: pass\ntry:\n    {deed}\nexcept Exception:\n    pass\n"

# Calls that the kernel must refuse; their numbers on x86-64 and ARM64, and their arguments.
CALLS = {
    "shared memory": ((29, 194), f"{KEY}, 4096, 0o1666"),
    "semaphores": ((64, 190), f"{KEY}, 1, 0o1666"),
    "messages": ((68, 186), f"{KEY}, 0o1666"),
    "a queue": ((240, 180), f"b'{TOKEN}', 0o102, 0o666, 0"),
    "a key": ((248, 217), "b'user', b'x', b'x', 1, -5"),
    "a keyring": ((250, 219), "0, -5, 1"),
    "a socket of Unix": ((41, 198), "1, 1, 0"),
    "a socket of the Internet": ((41, 198), "2, 1, 0"),
    "a raw socket": ((41, 198), "16, 3, 0"),
    "a socket of the machine": ((41, 198), "40, 1, 0"),
    "a pair of another kind": ((53, 199), "30, 1, 0, b'12345678'"),
    "a ring": ((425, 425), "1, b'\\0' * 120"),
    "a trace": ((101, 117), "16, os.getppid(), 0, 0"),
    "another's memory": ((310, 270), "os.getppid(), 0, 0, 0, 0, 0"),
    "another's memory to write": ((311, 271), "os.getppid(), 0, 0, 0, 0, 0"),
    "another's descriptor": ((438, 438), "os.pidfd_open(os.getppid()), 3, 0"),
    "a program for the kernel": ((321, 280), "0, b'\\0' * 72, 72"),
    "a counter": ((298, 241), "b'\\0' * 120, 0, -1, -1, 0"),
    "a mount": ((165, 40), "b'none', b'.', b'tmpfs', 0, 0"),
    "a user of its own": ((272, 97), "0x10000000"),
    "a clone with one": ((56, 220), "0x10000011, 0, 0, 0, 0"),
    "another root": ((161, 51), "b'.'"),
    "uncounted memory": ((319, 279), "b'x', 0"),
    "faults of pages": ((323, 282), "1"),
    "another's signals": ((72, 25), "0, 8, os.getppid()"),
}
ASKS = (
    "number = ({0}, {1})[not x86]\nassert libc.syscall(number, {2}) == -1 and ctypes.get_errno() == 1\nprint(input())\n"
)


@dataclass(frozen=True)
class Program:
    """A response, in which VICTIM and PID are not yet set."""

    name: str
    text: str
    refused: bool = False
    """Whether it scores 1, and only if the attack was refused."""


PROGRAMS = [
    *(
        Program(f"{way}: {target}", WRITES.format(target=place, way=code))
        for target, place in TARGETS.items()
        for way, code in WAYS.items()
    ),
    *(Program(name, DOES.format(deed=code)) for name, code in DEEDS.items()),
    *(
        Program(f"asks for {name}", ASKS.format(*numbers, given), refused=True)
        for name, (numbers, given) in CALLS.items()
    ),
]
_WRITES = len(TARGETS) * len(WAYS)
_LONG = ("fills", "leaves", "forks", "starts", "makes", "prints", "opens", "stops itself")
# Each way at one place, each deed that does not take long, and each call.
QUICK = [
    program
    for number, program in enumerate(PROGRAMS)
    if (number % 9 == 0 if number < _WRITES else not program.name.startswith(_LONG))
]


@dataclass
class Outside:
    """Everything that no program may change, and a process that it may not touch."""

    name: str
    folder: Path
    victim: subprocess.Popen[bytes]
    scorer: RewardScorer

    def seen(self) -> object:
        process = psutil.Process(self.victim.pid)
        return (
            [self._file(path) for path in sorted((self.folder / "victim").rglob("*"))],
            [
                path
                for where in (PACKAGE, PACKAGES, "/dev/shm", self.folder / "scratch")
                for path in Path(where).glob(f"*{TOKEN}*")
            ],
            [kind for kind in ("shm", "sem", "msg") if str(KEY) in Path(f"/proc/sysvipc/{kind}").read_text().split()],
            (
                process.status() in ("running", "sleeping"),
                process.nice(),
                process.cpu_affinity(),
                process.rlimit(psutil.RLIMIT_CPU),
            ),
            hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE.glob("*.py")))).hexdigest(),
        )

    def left(self, before: set[psutil.Process]) -> list[str]:
        """Processes that run in a program's folder, or that came below this one without being a worker."""
        scratch = str(self.folder / "scratch")
        found = [str(each) for each in psutil.process_iter() if _working_folder(each).startswith(scratch)]
        return found + [str(each) for each in below() - before if not _is_worker(each)]

    def score(self, programs: list[str]) -> Scores:
        reward = RewardSettings(name="tests", code=CodeReward(timeout=2.0), memory=2**30)
        texts = [f"```python\n{program}\n```" for program in programs]
        group = RewardGroup(0, "q", None, texts, [[1]] * len(texts), ["stop"] * len(texts), {"tests": ECHO})
        return self.scorer.score([reward], [group], SamplingSettings())

    @staticmethod
    def _file(path: Path) -> tuple[object, ...]:
        found = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        attributes = os.listxattr(path, follow_symlinks=False)
        return str(path), found.st_mode, found.st_uid, found.st_mtime_ns, content, attributes


def below() -> set[psutil.Process]:
    """Processes below this one: of the workers, and of other tests."""
    return set(psutil.Process().children(recursive=True))


def _working_folder(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except (psutil.Error, OSError):
        # It has ended meanwhile. For one that is just ending, psutil passes on what the kernel says.
        return ""


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "rlhfless_functions.rewards.worker" in process.cmdline()
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module", params=["with Landlock", "without"])
def outside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    if request.param == "with Landlock" and not landlock.version():
        pytest.skip("this kernel has no Landlock, so code under test is tried without it alone")
    folder = tmp_path_factory.mktemp("outside")
    for name in ("artifacts/manifest.json", "artifacts/deep/part", "home/.bashrc"):
        (folder / "victim" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "victim" / name).write_text(f"content of {name}")
    (folder / "scratch").mkdir()
    (folder / "start").mkdir()
    if request.param == "without":
        lacks = "from rlhfless_functions.runtime import landlock\nlandlock.version = lambda: 0\n"
        (folder / "start" / "sitecustomize.py").write_text(lacks)
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
    ) as victim:  # fmt: skip
        patch.setenv("TMPDIR", str(folder / "scratch"))
        patch.setenv("PYTHONPATH", str(folder / "start"), prepend=os.pathsep)
        scorer = RewardScorer()
        yield Outside(request.param, folder, victim, scorer)
        scorer.close()
        victim.kill()
    assert list((folder / "scratch").iterdir()) == []


def test_what_the_machine_lacks_is_in_the_log_once(outside: Outside, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "rlhfless.rewards")
    outside.scorer.close()
    outside.score([RIGHT, "import os; os._exit(0)"])
    outside.score([RIGHT])
    lacks = [text for text in caplog.messages if "this kernel has no Landlock" in text]
    assert len(lacks) == (outside.name == "without"), caplog.messages


def check(outside: Outside, programs: list[Program]) -> None:
    """Score programs, each between two honest ones."""
    head = HEAD.format(victim=str(outside.folder / "victim"), pid=outside.victim.pid)
    before, processes = outside.seen(), below()
    texts = [text for program in programs for text in (RIGHT, head + program.text)]
    scores = outside.score([*texts, RIGHT]).terms["tests"][0]
    assert outside.seen() == before
    assert outside.left(processes) == []
    assert scores[::2] == [1.0] * (len(programs) + 1)
    assert [
        program.name for program, score in zip(programs, scores[1::2], strict=True) if program.refused and score != 1
    ] == []


def in_parts(programs: list[Program]) -> list[list[Program]]:
    return [programs[start : start + 12] for start in range(0, len(programs), 12)]


def test_there_are_two_hundred_programs() -> None:
    assert len({program.text for program in PROGRAMS}) == len(PROGRAMS) >= 200


@pytest.mark.parametrize("programs", in_parts(QUICK), ids=lambda part: part[0].name)
def test_a_hostile_program_changes_nothing_outside(outside: Outside, programs: list[Program]) -> None:
    check(outside, programs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "programs", in_parts([each for each in PROGRAMS if each not in QUICK]), ids=lambda part: part[0].name
)
def test_no_hostile_program_changes_anything_outside(outside: Outside, programs: list[Program]) -> None:
    check(outside, programs)
