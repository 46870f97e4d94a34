"""`rlhfless run` that kills instances, or itself, once whenever fresh prompts take the places of groups.

    python -m tests.training.dying_driver JOB.yaml DEATHS.txt

It writes down what it has killed. The next driver then gets further.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from rlhfless_operator.training.stages import rollout
from rlhfless_operator.training.stages.replacing import Replacing
from tests.training.whole_jobs import run_job


class Deaths:
    """What has been killed so far, over all drivers."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def due(self, what: str) -> bool:
        return not self._file.exists() or what not in self._file.read_text().split()

    def happened(self, what: str) -> None:
        with self._file.open("a") as lines:
            lines.write(f"{what}\n")


def kill_as_groups_are_replaced(deaths: Deaths) -> None:
    """Have every replacement in training interrupted: in turns an instance of each kind dies, and the driver."""
    advance, generate_and_prepare, step = Replacing._advance, rollout.generate_and_prepare, 0

    async def noted(run: Any, task: rollout.RolloutTask, *rest: Any, **named: Any) -> float:
        nonlocal step
        step = task.step
        return await generate_and_prepare(run, task, *rest, **named)

    def interrupted(replacing: Replacing) -> None:
        before = len(replacing.rounds.drawn)
        advance(replacing)
        if (drawn := len(replacing.rounds.drawn)) == before:
            return
        if deaths.due(driver := f"step-{step}-drawn-{drawn}-driver"):
            if drawn % 2:
                deaths.happened(driver)
                os.kill(os.getpid(), signal.SIGKILL)
            _kill_once(deaths, f"step-{step}-drawn-{drawn}-generation", "generation-")
            _kill_once(deaths, f"step-{step}-drawn-{drawn}-preparation", "preparation-")

    rollout.generate_and_prepare = noted  # type: ignore[assignment]
    Replacing._advance = interrupted  # type: ignore[method-assign]


def _kill_once(deaths: Deaths, what: str, name: str) -> None:
    if not deaths.due(what):
        return
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(name):
                process.kill()
                deaths.happened(what)
                return


if __name__ == "__main__":
    kill_as_groups_are_replaced(Deaths(Path(sys.argv[2])))
    run_job(Path(sys.argv[1]))
