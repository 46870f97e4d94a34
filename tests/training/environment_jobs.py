"""Small jobs in the example's environment, and kills of their processes in mid-episode."""

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rlhfless_functions.artifacts import ArtifactError
from rlhfless_functions.data.rollouts import GeneratedSample, read_prepared, read_rollouts
from tests.command_line import run_command
from tests.training.killing import start
from tests.training.whole_jobs import folder_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools"
SLOW = """
import time


class SlowCounter(Counter):
    def add(self, amount: int) -> str:
        \"\"\"Add to the counter.

        Args:
            amount: the number to add.
        \"\"\"
        time.sleep({seconds})
        return super().add(amount)
"""

MakeJob = Callable[..., Path]
Command = Callable[[Path], list[str]]


@pytest.fixture(scope="module")
def make_job(tmp_path_factory: pytest.TempPathFactory) -> MakeJob:
    """Make a job of two small steps in the example's environment, whose tools take a while."""
    place = tmp_path_factory.mktemp("jobs")

    def make(
        name: str,
        actors: int,
        engine: str = "auto",
        seconds: float = 0.3,
        prices: dict[str, Any] | None = None,
        **environment: Any,
    ) -> Path:
        folder = place / name
        shutil.copytree(EXAMPLE, folder)
        job = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
        (folder / "counter.py").write_text((EXAMPLE / "counter.py").read_text() + SLOW.format(seconds=seconds))
        job["metadata"]["name"] = name
        spec = job["spec"]
        if "openenv" in environment:
            del spec["environment"]["python"]
        else:
            spec["environment"]["python"]["class"] = "SlowCounter"
        spec["environment"] |= {"letGo": "never", **environment}
        spec["batch"] |= {"promptsPerStep": 4, "samplesPerPrompt": 3, "minibatchSamples": 6}
        spec |= {"steps": 2, "planning": {"policy": "even"}, "artifacts": {"uri": str(place / "runs")}}
        spec["generation"] = {"instances": {"min": actors, "max": actors}, "engine": engine}
        spec["sampling"]["maxResponseTokens"] = 160
        if prices is not None:
            spec["prices"] = prices
        del spec["evaluation"]
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        return file

    return make


def eagerly(file: Path) -> list[str]:
    """The command of a driver that lets actors go at once."""
    return [sys.executable, "-m", "tests.training.eager_driver", str(file)]


def finish(file: Path, command: Command = run_command) -> None:
    """Run a job to its end."""
    log = file.parent / "log.txt"
    assert start(command(file), log).wait() == 0, log.read_text()[-4000:]


def learnt_samples(file: Path) -> list[GeneratedSample]:
    """The samples of all batches of a job."""
    parts = sorted((folder_of(file) / "batches").rglob("*.parquet"))
    return [sample for part in parts for sample in read_prepared([str(part)]).values()]


def kill_in_mid_episode(file: Path, kind: str, command: Command = run_command) -> None:
    """Run a job; kill a process of a kind once an answer of the environment is stored and episodes go on.

    Args:
        kind: the beginning of its name, or a part of its command. With `driver`, another one finishes the job.
    """

    def kill_driver(driver: int) -> bool:
        psutil.Process(driver).kill()
        return True

    def kill(driver: int) -> bool:
        found = list(_processes_below(psutil.Process(driver), kind))[:1]
        for process in found:
            process.kill()
        return bool(found)

    disturb_in_mid_episode(file, kill_driver if kind == "driver" else kill, command)


def disturb_in_mid_episode(file: Path, disturb: Callable[[int], bool], command: Command = run_command) -> None:
    """Run a job; disturb it, by its driver's id, once an answer of the environment is stored and episodes go on."""
    log = file.parent / "log.txt"
    driver = start(command(file), log)
    disturbed = False
    while driver.poll() is None:
        if not disturbed and any(sample.given[1:] for sample in _unfinished_samples(file)):
            disturbed = disturb(driver.pid)
        time.sleep(0.05)
    if disturbed and driver.returncode == -signal.SIGKILL:
        driver = start(command(file), log)
        driver.wait()
    assert driver.returncode == 0, log.read_text()[-4000:]
    assert disturbed, "nothing was there to disturb"


def _unfinished_samples(file: Path) -> list[GeneratedSample]:
    """The samples in the parts of the present step's rollouts that were stored before they were finished."""
    found = list[GeneratedSample]()
    for part in sorted((folder_of(file) / "rollouts").rglob("*.parquet")):
        with contextlib.suppress(ArtifactError):  # The parts of a step that is done are removed.
            found += [sample for sample in read_rollouts([str(part)]).values() if not sample.finished]
    return found


def _processes_below(process: psutil.Process, kind: str) -> Iterator[psutil.Process]:
    for each in process.children(recursive=True):
        try:
            if each.name().startswith(kind) or kind in " ".join(each.cmdline()):
                yield each
        except psutil.Error:
            continue
