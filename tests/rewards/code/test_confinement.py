# ruff: noqa: E501 - the programs are easier to read on one line
"""The rooms of tested code: honest programs work in them, and nothing else is read, kept or left."""

import contextlib
import errno
import os
import platform
import struct
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlhfless_functions.data.code_tests import CodeTests
from rlhfless_functions.rewards import seccomp
from rlhfless_functions.rewards.code import confinement, keeper, running
from rlhfless_functions.rewards.code.folders import fresh_folder, remove
from rlhfless_functions.rewards.code.running import NotBegunError, Verdict, run_tests
from rlhfless_functions.rewards.process import WorkerProcess
from tests.prerequisites import needs_landlock, needs_questions

BEST = confinement.best()


def run(folder: Path, program: str, output: str = "right", how: confinement.Confinement = BEST) -> Verdict:
    return run_tests(program, CodeTests(programs=[("given\n", output)]), "", 20.0, 2**30, folder, how)


HONEST = {
    "numpy": "import numpy; print('right' if numpy.arange(3).sum() == 3 else 'wrong')",
    "its input as a file": "print('right' if open('/dev/stdin').read() == 'given\\n' else 'wrong')",
    "files": "import tempfile\nwith tempfile.TemporaryDirectory() as d: open(d + '/x', 'w').write('right'); print(open(d + '/x').read())",
    "a temporary file": "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f: f.write('right'); f.seek(0); print(f.read())",
    "a database": "import sqlite3\nc = sqlite3.connect('x.db')\nc.execute('create table a(b)'); c.commit(); print('right')",
    "a pool of processes": "import multiprocessing\nwith multiprocessing.Pool(3) as p: print('right' if p.map(abs, [-1]) == [1] else 'wrong')",
    "an executor": "from concurrent.futures import ProcessPoolExecutor as E\nwith E(2) as e: print('right' if list(e.map(abs, [-1])) == [1] else 'wrong')",
    "a queue": "import multiprocessing as m\nq = m.Queue(); p = m.Process(target=q.put, args=('right',)); p.start(); print(q.get()); p.join()",
    "threads": "from concurrent.futures import ThreadPoolExecutor as E\nwith E(40) as e: print('right' if sum(e.map(int, range(99))) == 4851 else 'wrong')",
    "asyncio": "import asyncio\nasync def f():\n    p = await asyncio.create_subprocess_exec('echo', 'right', stdout=-1)\n    print((await p.communicate())[0].decode())\nasyncio.run(f())",
    "subprocesses": "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(\"right\")'], stderr=subprocess.DEVNULL, stdout=-1).stdout.decode())",
    "signals of its own": "import signal, subprocess\nsignal.signal(10, lambda *_: print('right')); signal.raise_signal(10)\np = subprocess.Popen(['sleep', '99']); p.terminate(); p.wait()",
    "an alarm": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('right')); signal.setitimer(0, 0.01); signal.pause()",
    "the time of a place": "import zoneinfo, datetime; datetime.datetime.now(zoneinfo.ZoneInfo('Europe/Berlin')); print('right')",
    "many processes, one after the other": "import os\nfor _ in range(200): os.waitpid(os.fork() or os._exit(0), 0)\nprint('right')",
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_works(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, HONEST[name]).passed == 1


PROGRAM = "print('right')\ndef double(x): return 2 * x"
TESTS = {
    "program": CodeTests(programs=[("", "right")]),
    "units": CodeTests(units=[{"kind": "script", "text": "assert double(2) == 4", "main": False}]),
}
FAILS_TO_BEGIN = """import os, sys
tries = {tries!r}
with open(tries, "a") as file:
    file.write(".")
if os.path.getsize(tries) <= {times}:
    os._exit(78)
os.execv(sys.executable, [sys.executable, "-I", {runner!r}, *sys.argv[1:]])
"""


def fail_to_begin(monkeypatch: pytest.MonkeyPatch, folder: Path, times: int) -> None:
    script = folder / "fails.py"
    script.write_text(FAILS_TO_BEGIN.format(tries=str(folder / "tries"), times=times, runner=str(running._RUNNER)))
    monkeypatch.setattr(running, "_RUNNER", script)


@pytest.mark.parametrize("tests", TESTS)
def test_a_program_that_does_not_begin_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tests: str
) -> None:
    fail_to_begin(monkeypatch, tmp_path, 4)
    (tmp_path / "room").mkdir()
    assert run_tests(PROGRAM, TESTS[tests], "", 20.0, 2**30, tmp_path / "room", BEST) == Verdict(passed=1)


@pytest.mark.parametrize("tests", TESTS)
def test_a_program_that_never_begins_is_no_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tests: str
) -> None:
    fail_to_begin(monkeypatch, tmp_path, 99)
    (tmp_path / "room").mkdir()
    with pytest.raises(NotBegunError, match="does not start the programs"):
        run_tests(PROGRAM, TESTS[tests], "", 20.0, 2**30, tmp_path / "room", BEST)


def test_a_program_that_can_t_be_confined_does_not_begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(confinement.Confinement, "_filter", "00" * 8)
    with pytest.raises(NotBegunError):
        run(tmp_path, "print('right')", how=replace(BEST))


def test_a_program_can_t_say_that_it_has_not_begun(tmp_path: Path) -> None:
    assert run(tmp_path, "print('right'); import os; os._exit(78)") == Verdict()
    assert run(tmp_path, "print('right', flush=True); import sys; sys.exit(78)") == Verdict()


SIGNALS = ("signals of its own", "a pool of processes", "numpy", "threads", "an alarm")


@pytest.mark.parametrize("name", SIGNALS)
def test_an_honest_program_works_without_landlock(tmp_path: Path, name: str) -> None:
    without = replace(BEST, files=False, truncation=False, signals=False)
    assert run(tmp_path, HONEST[name], how=without).passed == 1


@needs_landlock("no file is kept from a program")
@pytest.mark.parametrize("where", ["artifacts/part", "artifacts", "programs/other/solution.py"])
def test_a_program_reads_no_artifacts_and_no_neighbour(tmp_path: Path, where: str) -> None:
    own = tmp_path / "programs" / "own"
    for path in ("artifacts/part", "programs/other/solution.py", "programs/own/mine"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("right")
    for path, passed in ((tmp_path / where, 0), (own / "mine", 1)):
        program = (
            f"import os\np = {str(path)!r}\nprint('right' if os.path.isdir(p) and os.listdir(p) else open(p).read())"
        )
        assert run(own, program).passed == passed, path


@needs_questions("no fork is counted")
@pytest.mark.parametrize(
    "way", ["os.fork() or time.sleep(600)", "threading.Thread(target=time.sleep, args=(600,)).start()"]
)
def test_a_program_with_too_many_processes_is_ended_before_it_has_them(tmp_path: Path, way: str) -> None:
    program = f"import os, threading, time\nthreading.stack_size(2**16)\nfor n in range(999):\n    open('n', 'w').write(str(n))\n    {way}"
    verdict = run(tmp_path, program)
    assert (verdict.passed, verdict.fate) == (0, "crashed")
    assert keeper.MOST_TASKS // 2 < int((tmp_path / "n").read_text()) <= keeper.MOST_TASKS


@pytest.mark.parametrize("how", [BEST, replace(BEST, asks=False)], ids=["asking", "without asking"])
def test_nothing_that_a_program_starts_outlives_it(tmp_path: Path, how: confinement.Confinement) -> None:
    leave = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.setsid()\n        os.fork() and os._exit(0)\n        time.sleep(600)\n"
    assert run(tmp_path, leave + "print('right')", how=how).passed == 1
    assert run(tmp_path, leave + "os.kill(os.getpid(), 9)", how=how).fate == "crashed"
    left = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)]
    assert left == []


FILLS = {
    "files": "for n in range(9): open(str(n), 'wb').write(bytes(2**26 - 1))",
    "names": "for n in range(20000): open(str(n), 'w')",
    "files without names": "for n in range(9): f = open('f', 'wb'); os.unlink('f'); f.write(bytes(2**26 - 1)); x.append(f)",
    "files, and keeps its keeper busy": "for n in range(9): open(str(n), 'wb').write(bytes(2**26 - 1))\nwhile True: os.waitpid(os.fork() or os._exit(0), 0)",
}


@pytest.mark.parametrize("way", FILLS)
@needs_landlock("no file is kept from a program")
def test_a_program_that_fills_the_disk_is_ended(tmp_path: Path, way: str) -> None:
    assert run(tmp_path, f"import os, time\nx = []\n{FILLS[way]}\ntime.sleep(600)").fate == "crashed"


TAKES = {
    "in one process": "x = [bytearray(2**20) for _ in range(10**6)]",
    "in four processes": "for _ in range(3): os.fork() or (x.append(b'x' * 2**27), time.sleep(600))\nx.append(b'x' * 2**27)",
    "shared": "x += [mmap.mmap(-1, 2**25) for _ in range(12)]\nfor m in x: m.write(b'x' * 2**25)",
    "shared by children that have left it": "if os.fork() == 0:\n    os.setsid()\n    x += [mmap.mmap(-1, 2**25) for _ in range(12)]\n    for m in x: m.write(b'x' * 2**25)",
    "in four processes that hide": "for _ in range(3): os.fork() or (libc.prctl(4, 0, 0, 0, 0), x.append(b'x' * 2**27), time.sleep(600))",
}
MOST = 2**28


def take(folder: Path, program: str) -> Verdict:
    program = f"import ctypes, mmap, os, time\nlibc, x = ctypes.CDLL(None), []\n{program}"
    return run_tests(program, CodeTests(programs=[("", "right")]), "", 300.0, MOST, folder, BEST)


@pytest.mark.parametrize("way", TAKES)
def test_the_processes_of_a_program_have_its_memory_together(tmp_path: Path, way: str) -> None:
    verdict = take(tmp_path, f"{TAKES[way]}\ntime.sleep(600)")
    assert (verdict.passed, verdict.fate) == (0, "out_of_memory")
    assert [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)] == []


def test_memory_that_forks_share_counts_once(tmp_path: Path) -> None:
    forks = "x.append(b'x' * 2**27)\nfor _ in range(4): os.fork() or (time.sleep(1), os._exit(0))\n"
    assert take(tmp_path, forks + "for _ in range(4): os.wait()\nprint('right')").passed == 1


def test_a_program_that_puts_links_and_pipes_in_the_place_of_files_fools_nobody(tmp_path: Path) -> None:
    program = """
import os
for name in ("solution.py", "input", "output"):
    if os.path.lexists(name): os.unlink(name)
    os.symlink("/dev/zero", name) if name != "output" else os.mkfifo(name)
print("right")
"""
    tests = CodeTests(programs=[("", "right")] * 3)
    verdict = run_tests(program, tests, "", 5.0, 2**29, tmp_path, BEST)
    assert verdict.passed == (1 if BEST.files else 0)


def test_a_flood_of_spaces_is_no_answer(tmp_path: Path) -> None:
    assert run(tmp_path, "print('right', ' ' * 2**21)").passed == 0
    assert run(tmp_path, "print('right', ' ' * 2**10)").passed == 1


def test_a_folder_is_removed_whatever_is_in_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    (tmp_path / "parent").mkdir()
    home = Path.cwd()
    with fresh_folder(str(tmp_path / "parent")) as folder:
        (folder / "link").symlink_to(outside)
        (folder / "closed" / "inner").mkdir(parents=True)
        (folder / "closed").chmod(0)
        os.chdir(folder)
        try:
            for _ in range(1500):
                Path("deep").mkdir()
                os.chdir("deep")
        finally:
            os.chdir(home)
    assert list((tmp_path / "parent").iterdir()) == []
    assert (outside / "kept").exists()
    with pytest.raises(FileNotFoundError):
        remove(folder)


def test_workers_of_built_in_rewards_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("RLHFLESS_TOKEN", "token")
    for kind, has in (("code", False), ("math", False), ("python", True)):
        worker = WorkerProcess("x", kind, 2**30)
        try:
            with contextlib.suppress(psutil.AccessDenied):
                while not (environment := psutil.Process(worker._process.pid).environ()):
                    time.sleep(0.01)
                assert ("AWS_SECRET_ACCESS_KEY" in environment) is has
                assert "RLHFLESS_TOKEN" not in environment
        finally:
            worker.close()


def answer(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run a filter as the kernel does (seccomp_run_filters), and return its answer."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps, at, word = list(struct.iter_unpack("=HBBI", code)), 0, 0
    while True:
        kind, if_true, if_false, value = steps[at]
        at += 1
        if kind == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
        elif kind == 0x54:
            word &= value
        elif kind == 0x06:
            return value
        else:
            holds = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[kind]
            at += if_true if holds else if_false


ALLOW, ASK, REFUSE, UNKNOWN = 0x7FFF0000, 0x7FC00000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
MACHINES = {
    "x86_64": (0xC000003E, {"read": 0, "socket": 41, "pair": 53, "clone": 56, "clone3": 435, "prlimit": 302, "openat": 257, "kill": 62, "truncate": 76}),
    "aarch64": (0xC00000B7, {"read": 63, "socket": 198, "pair": 199, "clone": 220, "clone3": 435, "prlimit": 261, "openat": 56, "kill": 129, "truncate": 45}),
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_filters_know_the_calls_of_both_machines(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    architecture, calls = MACHINES[machine]
    code = seccomp.refusals()
    expected = [
        ("read", (), ALLOW), ("socket", (1,), REFUSE), ("pair", (1,), ALLOW), ("pair", (2,), REFUSE), ("clone3", (), UNKNOWN),
        ("clone", (17,), ALLOW), ("clone", (0x10000011,), REFUSE), ("prlimit", (0,), ALLOW), ("prlimit", (1,), REFUSE),
    ]  # fmt: skip
    assert [(name, given, answer(code, architecture, calls[name], *given)) for name, given, _ in expected] == expected
    assert answer(code, architecture + 1, calls["read"]) == answer(code, architecture, 0x40000000) == REFUSE

    code = seccomp.watch(files=False, truncation=False, signals=False, asks=True)
    write, create = os.O_WRONLY, os.O_CREAT
    asked = [("clone", (17,), ASK), ("kill", (1, 9), ASK), ("openat", (0, 0, 0), ALLOW), ("openat", (0, 0, write), REFUSE), ("openat", (0, 0, create), REFUSE)]  # fmt: skip
    assert [(name, given, answer(code, architecture, calls[name], *given)) for name, given, _ in asked] == asked

    code = seccomp.watch(files=True, truncation=False, signals=True, asks=False)
    passed = [("clone", (17,), ALLOW), ("kill", (1, 9), ALLOW), ("openat", (0, 0, write | os.O_TRUNC), ALLOW), ("openat", (0, 0, os.O_TRUNC), REFUSE), ("truncate", (), REFUSE)]  # fmt: skip
    assert [(name, given, answer(code, architecture, calls[name], *given)) for name, given, _ in passed] == passed
    assert seccomp.watch(files=True, truncation=True, signals=True, asks=True) != code


def test_other_machines_get_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert seccomp.refusals() == b""
    assert not seccomp.install(b"")
    found = confinement.lacking(replace(BEST, files=False, asks=False), filtered=False)
    assert [word in sentence for word, sentence in zip(("network", "Landlock", "fork"), found, strict=True)] == [
        True
    ] * 3
