"""A job as a process of its own whose parts are killed at random, one after the other, until it ends."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

VICTIMS = ["driver", "generation", "preparation", "learning", "reward"]


@dataclass
class Killed:
    """What became of a run."""

    victims: Counter[str] = field(default_factory=Counter)
    """How often each kind was killed."""
    orphans: list[psutil.Process] = field(default_factory=list)
    """What drivers that were killed had below them."""


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Begin, with all that is said in a file."""
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def run_killing(
    command: Sequence[str], log: Path, chance: random.Random, *, kills: int, pause: float, patience: float
) -> Killed:
    """Run a job to its end, and begin it again whenever its driver was killed.

    Args:
        command: runs the job, and goes on with it when it is given again.
        log: what it says is appended there.
        chance: says whom to kill, and when; those that were killed least come first.
        kills: how many.
        pause: most seconds from one kill to the next.
        patience: seconds after which nothing more is killed.
    """
    killed = Killed()
    driver = start(command, log)
    deadline = time.monotonic() + patience
    while killed.victims.total() < kills and time.monotonic() < deadline:
        if driver.poll() is not None:
            assert driver.returncode in (0, -signal.SIGKILL), log.read_text()
            if driver.returncode == 0:
                break
            driver = start(command, log)
        kind = min(VICTIMS, key=lambda victim: (killed.victims[victim], chance.random()))
        time.sleep(chance.uniform(0.0, pause))
        if kind == "driver":
            if not _victims_of(driver, chance.choice(["generation", "preparation", "learning"])):
                continue
            killed.orphans += psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
            driver.wait()
            killed.victims[kind] += 1
        else:
            for process in _victims_of(driver, kind)[:1]:
                process.kill()
                killed.victims[kind] += 1
    while driver.wait() == -signal.SIGKILL:
        driver = start(command, log)
    assert driver.returncode == 0, log.read_text()[-4000:]
    return killed


def _victims_of(driver: subprocess.Popen[bytes], kind: str) -> list[psutil.Process]:
    """The living processes of one kind below a driver."""
    found = []
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            name, command = process.name(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        if kind == "reward":
            if "rlhfless_functions.rewards" in command:
                found.append(process)
        elif name.startswith(f"{kind}-"):
            found.append(process)
    return found


def killed_at_writes(file: Path, folder: Path, share: int) -> list[str]:
    """Run a job whose driver dies at one of `share` places of its writes; the places."""
    deaths, log = folder / "deaths.txt", folder / "log.txt"
    command = [sys.executable, "-m", "tests.training.dying_at_writes", str(file), str(deaths), str(share)]
    while True:
        with log.open("ab") as output:
            ended = subprocess.run(command, stdout=output, stderr=output, timeout=900, check=False)
        if ended.returncode == 0:
            return deaths.read_text().splitlines()
        assert ended.returncode == -signal.SIGKILL, log.read_text()[-4000:]
