"""`rlhfless run` that kills an instance of each kind, and then itself, once in every round of every step.

    python -m tests.training.dying_driver JOB.yaml DEATHS.txt

It writes down what it has killed. The next driver then gets one round further.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from rlhfless_operator.training.actors.generated import CompleteGroup
from rlhfless_operator.training.stages import rollout
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


def kill_in_every_round(deaths: Deaths) -> None:
    """Have what is done in each round of training interrupted."""
    rounds: Counter[int] = Counter()
    generate_and_prepare, prepare = rollout.generate_and_prepare, rollout.prepare
    now = ""

    async def in_round(run: Any, task: rollout.RolloutTask, *rest: Any) -> float:
        nonlocal now
        rounds[task.step] += 1
        now = f"step-{task.step}-round-{rounds[task.step]}" if task.purpose == "training" else ""
        return await generate_and_prepare(run, task, *rest)

    def interrupted(platform: Any, groups: AsyncIterator[CompleteGroup], *rest: Any, **named: Any) -> Any:
        return prepare(platform, interrupting(groups), *rest, **named)

    async def interrupting(groups: AsyncIterator[CompleteGroup]) -> AsyncIterator[CompleteGroup]:
        killing = asyncio.create_task(_kill_soon(deaths, f"{now}-generation", "generation-")) if now else None
        count = 0
        async for group in groups:
            if killing is not None:
                killing.cancel()
            yield group
            count += 1
            # By then it is under way in preparation.
            await asyncio.sleep(0.05)
            if now and count == 1:
                _kill_once(deaths, f"{now}-preparation", "preparation-")
            elif now:
                die(f"{now}-driver")
        if now:
            die(f"{now}-driver")

    def die(what: str) -> None:
        if deaths.due(what):
            deaths.happened(what)
            os.kill(os.getpid(), signal.SIGKILL)

    rollout.generate_and_prepare = in_round  # type: ignore[assignment]
    rollout.prepare = interrupted


async def _kill_soon(deaths: Deaths, what: str, name: str) -> None:
    """Kill the first process of this name, once there is one."""
    while deaths.due(what):
        _kill_once(deaths, what, name)
        await asyncio.sleep(0.005)


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
    kill_in_every_round(Deaths(Path(sys.argv[2])))
    run_job(Path(sys.argv[1]))
