"""Unit tests of a response's code: what passes, what cannot harm, what cannot cheat."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.rewards.checks import WAIT_FACTOR
from rlhfless_functions.rewards.code import scoring as module
from rlhfless_functions.rewards.code.confinement import Confinement
from rlhfless_functions.rewards.code.running import NotBegunError, Verdict, shares_of
from rlhfless_functions.rewards.code.scoring import longest_call, usable_confinement
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import CodeReward, RewardSettings, SamplingSettings

ASSERTS = ["assert double(1) == 2", "assert double(3) == 6"]
RIGHT = "def double(x): return 2 * x"


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    scorer = RewardScorer()
    yield scorer
    scorer.close()


def score(scorer: RewardScorer, tests: Any, *programs: str) -> list[float | None]:
    completions = [f"I think:\n```python\n{program}\n```\n" for program in programs]
    reward = RewardSettings(name="tests", code=CodeReward(timeout=1.0), memory=2**30)
    size = len(completions)
    group = RewardGroup(2, "q", None, completions, [[1]] * size, ["stop"] * size, {"tests": tests})
    return scorer.score([reward], [group], SamplingSettings()).totals[0]


@pytest.mark.parametrize("begins", [True, False])
def test_a_machine_that_starts_no_program_that_asks_starts_those_that_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begins: bool
) -> None:
    def run_tests(*given: Any) -> Verdict:
        confinement: Confinement = given[-1]
        if confinement.asks or not begins:
            raise NotBegunError
        return Verdict(passed=1)

    monkeypatch.setattr(module, "best", lambda: Confinement(files=True, truncation=True, signals=True, asks=True))
    monkeypatch.setattr(module, "run_tests", run_tests)
    if begins:
        assert not usable_confinement(2**30, str(tmp_path)).asks
    else:
        with pytest.raises(RuntimeError, match="runs no program under the limits of tested code"):
            usable_confinement(2**30, str(tmp_path))


def test_the_score_is_the_share_of_asserts_that_hold(scorer: RewardScorer) -> None:
    programs = [RIGHT, "def double(x): return 2", "def double(x): return x", "print('no function')", "def double(x:"]
    assert score(scorer, ASSERTS, *programs) == [1.0, 0.5, 0.0, 0.0, 0.0]


def test_programs_read_standard_input_and_are_compared_by_what_they_print(scorer: RewardScorer) -> None:
    tests = [{"input": "1\n", "output": "2"}, {"input": "3\n", "output": "6\n"}]
    programs = [
        "print(2 * int(input()))",
        "if __name__ == '__main__':\n    print(2, ' ')",
        "print(2 * int(input())); raise SystemExit(1)",
        "while True: pass",
        "while True: print('flood')",
    ]
    assert score(scorer, tests, *programs) == [1.0, 0.5, 0.0, 0.0, 0.0]


def test_code_that_misbehaves_scores_nothing_and_harms_nothing(scorer: RewardScorer) -> None:
    programs = [
        "while True: pass",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "x = bytearray(2**31)",
        RIGHT + "\nimport os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(1000)",
        RIGHT,
    ]
    assert score(scorer, ASSERTS, *programs) == [0.0, 0.0, 0.0, 1.0, 1.0]


def fates(scorer: RewardScorer, tests: Any, program: str) -> tuple[float | None, dict[str, float]]:
    reward = RewardSettings(name="tests", code=CodeReward(timeout=10.0), memory=2**29)
    group = RewardGroup(2, "q", None, [f"```python\n{program}\n```"], [[1]], ["stop"], {"tests": tests})
    scores = scorer.score([reward], [group], SamplingSettings())
    names = ("timed_out", "out_of_memory", "crashed")
    return scores.totals[0][0], {name: scores.metrics[f"reward/tests/{name}/sum"] for name in names}


FULL = "x = bytearray(2**30)"
ECHO = [{"input": "1", "output": "1"}]


@pytest.mark.parametrize(
    ("tests", "program", "fate"),
    [
        (ASSERTS, FULL, "out_of_memory"),
        (ASSERTS, f"def double(x):\n    {FULL}", "out_of_memory"),
        (ECHO, FULL, "out_of_memory"),
        (ECHO, "xs = []\nwhile True: xs.append(' ' * 2**20)", "out_of_memory"),
        (ASSERTS, "import os\ndef double(x): os.kill(os.getpid(), 9)", "crashed"),
        (ECHO, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "crashed"),
        (ECHO, "while True: print('flood' * 9999)", "crashed"),
        (ASSERTS, "def double(x): return 0", None),
        (ASSERTS, "def double(x): raise ValueError", None),
        (ECHO, "raise SystemExit(1)", None),
    ],
)
def test_what_a_limit_ended_is_counted_as_that(
    scorer: RewardScorer, tests: Any, program: str, fate: str | None
) -> None:
    expected = {name: float(name == fate) for name in ("timed_out", "out_of_memory", "crashed")}
    assert fates(scorer, tests, program) == (0.0, expected)


@pytest.mark.parametrize("cores", [1, 2, 8, 128, 1024])
def test_the_memory_of_a_response_does_not_shrink_with_the_cores(cores: int) -> None:
    width, share = shares_of(cores, 4 * 2**30)
    assert 1 <= width <= cores
    assert share >= 512 * 2**20
    assert width * share <= 4 * 2**30
    assert shares_of(cores, 2**28) == (1, 2**28)


def test_numpy_is_imported_within_the_share_of_a_machine_with_many_cores(scorer: RewardScorer) -> None:
    program = """
import numpy, os
def double(x): return int(numpy.dot([x], [2]))
def threads(): return os.environ['OPENBLAS_NUM_THREADS']
"""
    assert fates(scorer, [*ASSERTS, "import numpy\nassert threads() == '1'"], program)[0] == 1.0


def test_a_test_that_hangs_fails_alone(scorer: RewardScorer) -> None:
    program = "def double(x):\n    while x == 3: pass\n    return 2 * x"
    assert score(scorer, [*ASSERTS, "assert double(4) == 8"], program) == [pytest.approx(2 / 3)]
    tests = [{"input": f"{number}\n", "output": f"{2 * number}"} for number in (1, 3, 4)]
    program = "n = int(input())\nwhile n == 3: pass\nprint(2 * n)"
    assert score(scorer, tests, program) == [pytest.approx(2 / 3)]


def test_exiting_quietly_is_not_passing(scorer: RewardScorer) -> None:
    programs = [
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os\ndef double(x): os._exit(0)",
        "def double(x): raise SystemExit(0)",
        "import os\nfor n in range(3, 64):\n"
        "    try: os.write(n, b'passed 0\\npassed 1\\nend\\n')\n"
        "    except OSError: pass",
    ]
    assert score(scorer, ASSERTS, *programs) == [0.0] * 5


def test_tests_do_not_see_each_others_traces(scorer: RewardScorer) -> None:
    program = "calls = []\ndef double(x):\n    calls.append(x)\n    return 2 * x if len(calls) == 1 else None"
    assert score(scorer, ASSERTS, program) == [1.0]


def test_code_gets_no_environment_and_an_empty_folder(scorer: RewardScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    program = "import os\nprint(os.environ.get('AWS_SECRET_ACCESS_KEY'), sorted(os.listdir()))"
    assert score(scorer, [{"input": "", "output": "None ['solution.py']"}], program) == [1.0]


CONNECT = "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)\ndef double(x): return 2 * x"


def test_code_reaches_no_network(scorer: RewardScorer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = CONNECT.format(port=server.getsockname()[1])
        assert score(scorer, ASSERTS, program, RIGHT) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("made", "allowed"),
    [
        ("socket.socket(socket.AF_INET)", False),
        ("socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)", False),
        ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", False),
        ("ctypes.CDLL(None, use_errno=True).syscall(425, 1, b'\\0' * 120) + 1 or exit(ctypes.get_errno() != 1)", True),
        ("socket.socket(socket.AF_UNIX)", False),
        ("socket.socketpair()", True),
        ("subprocess.run([sys.executable, '-c', 'import socket; socket.socket()'], check=True)", False),
    ],
)
def test_a_process_that_refuses_sockets_makes_only_pairs(made: str, allowed: bool) -> None:
    program = f"""
import ctypes, socket, subprocess, sys
from rlhfless_functions.rewards import seccomp
socket.socket()
assert seccomp.install(seccomp.refusals())
try:
    {made}
except (PermissionError, subprocess.CalledProcessError):
    exit(9)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == (0 if allowed else 9), ended.stderr


def test_nothing_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    scorer = RewardScorer()
    assert score(scorer, ASSERTS, RIGHT, "open('/' + 'dev/null'); open('mine', 'w').write('x')") == [1.0, 0.0]
    scorer.close()
    assert list(tmp_path.iterdir()) == []


def test_data_without_tests_is_an_error_that_names_the_column(scorer: RewardScorer) -> None:
    with pytest.raises(TaskError, match=r"there are no tests in any column tests, .* code\.testsColumn"):
        score(scorer, None, RIGHT)


def test_a_group_has_the_time_of_all_its_tests_and_of_running_the_code_for_each() -> None:
    assert longest_call({"tests": ASSERTS}, "tests", 10.0, responses=8) == WAIT_FACTOR * 2 * 2 * 10 * 8
