"""Every group gets an outcome, also if a reward misbehaves, and nothing that the reward started is left behind."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_functions.rewards.pool import RewardPool, RewardUnusableError, WorkerSettings
from rlhfless_functions.rewards.process import WorkerStopped
from rlhfless_functions.runtime.activity import Activity
from tests.rewards.files import MEMORY, MISBEHAVIOUR, Reward, fate, make_group
from tests.rewards.files import reward as reward  # A fixture.


def gone(pid: int) -> bool:
    """Whether a process has ended; waits for it."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def appears(path: Path) -> str:
    """The content of a file that another process writes; waits for it."""
    for _ in range(3000):
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} was never written")


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("raise ValueError('broken')", "raised ValueError: broken (reward_0.py, line 11)"),
        ("sys.exit(3)", "called sys.exit(3)"),
        ("os._exit(3)", "ended its worker process with exit code 3"),
        ("os.abort()", "ended its worker process by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended its worker process by SIGSEGV"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
        ("return [completions[0][0]['content']]", "messages where prompts are, in columns such as `messages` or"),
        ("return [1.0]", "returned 1 rewards for 2 responses"),
        ("return [float('nan'), 1.0]", "returned nan as a reward"),
        ("return [1.0, float('inf')]", "returned inf as a reward"),
        ("return ['1.0', '0.0']", "returned '1.0', not a number or None"),
        ("return 1.0", "returned 1.0, not a list"),
        ("return None", "returned None, not a list"),
        ("return {'a': 1, 'b': 2}", "returned {'a': 1, 'b': 2}, not a list"),
        ("x = bytearray(2**30)", "ran out of memory"),
        ("os.closerange(3, 256)", "ended its worker process with exit code 1"),
        ("write_to_all_descriptors()", "wrote to the worker's own socket"),
    ],
)
def test_a_misbehaving_call_is_an_error_of_its_own_group(
    reward: Callable[..., Reward], action: str, error: str
) -> None:
    before, culprit, after = reward(MISBEHAVIOUR.format(action)).score(make_group(0), make_group(1), make_group(2))
    assert fate(before) == fate(after) == "[1.0, 1.0]"
    assert error in fate(culprit)
    assert culprit.scores == [None, None]


@pytest.mark.parametrize(
    "action",
    [
        "time.sleep(1000)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(1000)",
        "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
def test_a_call_that_hangs_is_killed_at_its_time_limit(reward: Callable[..., Reward], action: str) -> None:
    before, culprit, after = reward(MISBEHAVIOUR.format(action)).score(
        make_group(0), make_group(1), make_group(2), seconds=2.0
    )
    assert fate(before) == fate(after) == "[1.0, 1.0]"
    assert fate(culprit) == "took longer than 2 s"


def test_giving_up_stops_at_the_first_error(reward: Callable[..., Reward], tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    mine = reward(
        f"""
def reward(prompts, completions):
    print(prompts[0], file=open({str(calls)!r}, "a"))
    if prompts[0] == "question 1":
        raise ValueError("broken")
    return [1.0] * len(completions)
"""
    )
    outcomes = mine.score(*map(make_group, range(50)), give_up=True)
    assert fate(outcomes[0]) == "[1.0, 1.0]"
    assert "broken" in fate(outcomes[1])
    assert {fate(outcome) for outcome in outcomes[2:]} == {"was not called after an earlier error"}
    # Answers to the abandoned request must not be taken for those to the next.
    assert [fate(outcome) for outcome in mine.score(make_group(7, "x", "y", "z"))] == ["[1.0, 1.0, 1.0]"]


def test_a_worker_killed_from_outside_is_replaced_and_the_call_made_again(
    reward: Callable[..., Reward], tmp_path: Path
) -> None:
    mine = reward(
        f"""
import os, pathlib, signal
def reward(prompts, completions):
    tries = pathlib.Path({str(tmp_path)!r}) / prompts[0]
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    if len(tries.read_text()) <= (1 if prompts[0] == "question 0" else 2):
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(completions)
"""
    )
    assert [fate(outcome) for outcome in mine.score(make_group(0), make_group(1), make_group(2))] == ["[1.0, 1.0]"] * 3


def test_a_worker_killed_again_and_again_is_an_error(reward: Callable[..., Reward]) -> None:
    before, culprit, after = reward(MISBEHAVIOUR.format("os.kill(os.getpid(), signal.SIGKILL)")).score(
        make_group(0), make_group(1), make_group(2)
    )
    assert "killed from outside" in fate(culprit) and "3 times in a row" in fate(culprit)
    assert fate(before) == fate(after) == "[1.0, 1.0]"


def test_a_keeper_or_an_idle_worker_that_was_killed_is_replaced_unnoticed(reward: Callable[..., Reward]) -> None:
    mine = reward("import os\ndef reward(completions): return [os.getpid(), os.getppid()]")
    worker, reaper = mine.score(make_group(0))[0].scores
    os.kill(int(reaper), signal.SIGKILL)
    assert gone(int(worker))
    worker, reaper = mine.score(make_group(0))[0].scores
    os.kill(int(worker), signal.SIGKILL)
    assert gone(int(reaper))
    assert mine.score(make_group(0))[0].error is None


def test_a_worker_is_kept_from_call_to_call(reward: Callable[..., Reward]) -> None:
    mine = reward("import os\ndef reward(completions): return [os.getpid()] * len(completions)")
    pids = {score for _ in range(3) for outcome in mine.score(*map(make_group, range(4))) for score in outcome.scores}
    assert len(pids) == 1


def test_groups_are_dealt_to_several_workers_and_answered_in_order(reward: Callable[..., Reward]) -> None:
    mine = reward(
        "import os\ndef reward(prompts, completions): return [int(prompts[0].split()[1]), os.getpid()]", size=3
    )
    outcomes = mine.score(*map(make_group, range(7)))
    assert [outcome.scores[0] for outcome in outcomes] == list(range(7))
    assert len({outcome.scores[1] for outcome in outcomes}) == 3


def test_output_is_logged_and_harms_nothing(reward: Callable[..., Reward], caplog: pytest.LogCaptureFixture) -> None:
    mine = reward(
        """
import os, subprocess, sys
print("loading")
def reward(completions):
    print("to stdout")
    print("to stderr", file=sys.stderr)
    os.write(1, b"to the descriptor\\n")
    subprocess.run(["echo", "from a child"])
    print("x" * 10_000_000)
    for _ in range(100_000):
        print("again")
    return [1.0] * len(completions)
"""
    )
    with caplog.at_level(logging.INFO, "rlhfless.rewards"):
        assert fate(mine.score(make_group(0))[0]) == "[1.0, 1.0]"
        mine.pool.close()
    lines = [record.getMessage() for record in caplog.records]
    for said in ("loading", "to stdout", "to stderr", "to the descriptor", "from a child"):
        assert f"reward mine: {said}" in lines
    assert len(lines) < 500 and max(map(len, lines)) < 3000


def test_a_reward_may_use_alarms(reward: Callable[..., Reward]) -> None:
    mine = reward(
        """
import signal, time
class Late(Exception): pass
def ring(*_): raise Late
def reward(prompts, completions):
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    if prompts[0] == "question 1":
        return [0.5, 0.5]  # and leaves the alarm set
    try:
        time.sleep(1000)
    except Late:
        return [1.0, 1.0]
"""
    )
    outcomes = mine.score(*map(make_group, range(3)))
    assert [fate(outcome) for outcome in outcomes] == ["[1.0, 1.0]", "[0.5, 0.5]", "[1.0, 1.0]"]
    time.sleep(0.1)
    assert fate(mine.score(make_group(1))[0]) == "[0.5, 0.5]"


def test_memory_of_all_descendants_counts(reward: Callable[..., Reward]) -> None:
    action = """
        import mmap
        for _ in range(3):
            if os.fork() == 0:
                shared = mmap.mmap(-1, 60 * 2**20)
                for at in range(0, len(shared), 4096):
                    shared[at] = 1
                time.sleep(1000)
        time.sleep(1000)
"""
    culprit, after = reward(MISBEHAVIOUR.format(action), memory=120 * 2**20).score(make_group(1), make_group(2))
    assert "more than its limit of 120 MiB" in fate(culprit)
    assert fate(after) == "[1.0, 1.0]"


FORKS = """
import os, time
def reward(prompts, completions):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open({path!r}, "w") as file:
                file.write(str(os.getpid()))
            time.sleep(1000)
        os._exit(0)
    if prompts[0] == "question 1":
        time.sleep(1000)
    return [1.0] * len(completions)
"""


def test_a_daemon_that_a_reward_started_ends_with_its_worker(reward: Callable[..., Reward], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    mine = reward(FORKS.format(path=str(path)))
    assert fate(mine.score(make_group(0))[0]) == "[1.0, 1.0]"
    daemon = int(appears(path))
    mine.pool.close()
    assert gone(daemon)


def test_a_child_that_a_reward_forgets_does_not_answer_twice(reward: Callable[..., Reward]) -> None:
    mine = reward("import os\ndef reward(completions):\n    os.fork()\n    return [1.0] * len(completions)")
    assert [fate(outcome) for outcome in mine.score(*map(make_group, range(5)))] == ["[1.0, 1.0]"] * 5
    assert [fate(outcome) for outcome in mine.score(make_group(0, "a"))] == ["[1.0]"]


def test_nothing_outlives_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FORKS.format(path=str(tmp_path / "daemon")))
    (tmp_path / "parent.py").write_text(
        f"""
import os
from pathlib import Path
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.pool import RewardPool, WorkerSettings
setup = dict(file={str(tmp_path / "reward.py")!r}, function="reward", style="trl", text=None)
pool = RewardPool(WorkerSettings("mine", "python", setup, {MEMORY}))
pool.start()
Path({str(tmp_path / "reaper")!r}).write_text(str(pool._lanes[0]._worker._process.pid))
group = RewardGroup(1, "question 1", None, ["a"], [[1]], ["stop"], {{}})
pool.score([group], seconds=lambda _: 1000.0, give_up=True, stopped=lambda: False)
"""
    )
    with subprocess.Popen([sys.executable, str(tmp_path / "parent.py")]) as parent:
        daemon, reaper = int(appears(tmp_path / "daemon")), int(appears(tmp_path / "reaper"))
        parent.kill()
    assert gone(daemon) and gone(reaper)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def other(): pass\ndef another(): pass", "has no function 'reward'; it has another, other"),
        ("x = 1", "it has no functions"),
        ("reward = 3", "is not a function but int"),
        ("def reward(:", "SyntaxError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; os._exit(5)", "exit code 5"),
        ("raise SystemExit(2)", "sys.exit(2)"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_why(reward: Callable[..., Reward], source: str, why: str) -> None:
    with pytest.raises(RewardUnusableError, match=r".*") as raised:
        reward(source).score(make_group(0))
    assert why in str(raised.value)


def test_a_file_that_hangs_when_loaded_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)")
    setup = {"file": str(tmp_path / "slow.py"), "function": "reward", "style": "trl", "text": None}
    pool = RewardPool(WorkerSettings("mine", "python", setup, MEMORY, load_seconds=1.0))
    with pytest.raises(RewardUnusableError, match="took longer than 1 s"):
        pool.score([make_group(0)], seconds=lambda _: 1.0, give_up=True, stopped=lambda: False)


def test_a_call_that_waits_is_no_standstill_of_the_instance(reward: Callable[..., Reward]) -> None:
    mine = reward(MISBEHAVIOUR.format("time.sleep(1000)"))
    activity, still = Activity(), []

    def stopped() -> bool:
        # As if it had not worked since long ago.
        activity._since -= 1000.0
        activity._used = activity._cpu_seconds()
        still.append(activity.still_seconds())
        return len(still) > 1

    with pytest.raises(WorkerStopped):
        mine.score(make_group(1), stopped=stopped)
    assert still == [0.0, 0.0]


def test_calls_end_when_the_caller_wants_them_to(reward: Callable[..., Reward]) -> None:
    mine = reward(MISBEHAVIOUR.format("time.sleep(1000)"))
    looks = itertools.count()
    with pytest.raises(WorkerStopped):
        mine.score(make_group(1), stopped=lambda: next(looks) > 1)
    assert fate(mine.score(make_group(0))[0]) == "[1.0, 1.0]"
