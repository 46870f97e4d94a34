"""`rlhfless run` of an asynchronous job that kills itself once at each of some points.

    python -m tests.training.dying_ahead JOB.yaml DEATHS.txt taken-2 learnt-3

It writes down where it has died. The next driver then gets one point further.
"""

import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlhfless_functions.api import LearnResult
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.training.journal.async_journal import AsyncJournal, BegunRollout, TakenPiece, TakenStep
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.stages.learning import Learning
from tests.training.dying_driver import Deaths
from tests.training.holding_back import hold_back
from tests.training.whole_jobs import folder_of, run_job

POINTS = tuple(f"{point}-{step}" for step in (2, 3) for point in ("begun", "prepared", "taken", "learnt"))
"""Of a step: its generation is written down, its batch is complete, its learning is written down, its weights exist.
With pieces, `piece0`, `piece1` and so on are those of a step, each when it is written down.
At `left` it is learnt, the next one is taken, and its weights may not be published."""
OVERTAKEN = "overtaken"
"""The second step's batch is complete, and written down, and the first one's is not."""


def die_at(points: Collection[str], deaths: Deaths) -> None:
    """Have a driver die as soon as it comes to one of the points at which none has died before."""
    begin, take, add = AsyncJournal.begin, AsyncJournal.take, AsyncJournal.add
    keep_rollout, commit, let_go = StepJournal.keep_rollout, StepJournal.commit, Learning.let_go

    def reached(point: str, step: int) -> None:
        what = f"{point}-{step}"
        if what in points and deaths.due(what):
            deaths.happened(what)
            os.kill(os.getpid(), signal.SIGKILL)

    def dies_when_begun(journal: AsyncJournal, begun: BegunRollout) -> BegunRollout:
        found = begin(journal, begun)
        reached("begun", begun.step)
        return found

    def dies_when_taken(journal: AsyncJournal, taken: TakenStep) -> TakenStep:
        found = take(journal, taken)
        reached("taken", taken.step)
        return found

    def dies_when_added(journal: AsyncJournal, step: int, number: int, piece: TakenPiece) -> TakenPiece:
        found = add(journal, step, number, piece)
        reached(f"piece{number}", step)
        return found

    def dies_when_prepared(journal: StepJournal, step: int, batch: StepBatch) -> None:
        keep_rollout(journal, step, batch)
        reached("prepared", step)

    async def dies_when_learnt(journal: StepJournal, step: int, *rest: Any) -> Any:
        reached("learnt", step)
        return await commit(journal, step, *rest)

    async def dies_when_left(learning: Learning) -> LearnResult:
        learned = await let_go(learning)
        reached("left", learned.weights.version)
        return learned

    Learning.let_go = dies_when_left  # type: ignore[method-assign]
    AsyncJournal.begin = dies_when_begun  # type: ignore[method-assign]
    AsyncJournal.take = dies_when_taken  # type: ignore[method-assign]
    AsyncJournal.add = dies_when_added  # type: ignore[method-assign]
    StepJournal.keep_rollout = dies_when_prepared  # type: ignore[method-assign]
    StepJournal.commit = dies_when_learnt  # type: ignore[method-assign]


def die_when_overtaken(file: Path, deaths: Deaths) -> None:
    """Have a driver die while a response of the first step goes on, and nothing of the second step does."""

    def die(pid: int) -> None:
        deaths.happened(OVERTAKEN)
        os.kill(os.getpid(), signal.SIGKILL)

    hold_back(1, until=(folder_of(file) / "results" / "step-000002" / "batch.json").exists, then=die)


if __name__ == "__main__":
    job, dead, points = Path(sys.argv[1]), Deaths(Path(sys.argv[2])), sys.argv[3:]
    if OVERTAKEN in points and dead.due(OVERTAKEN):
        die_when_overtaken(job, dead)
    die_at(points, dead)
    run_job(job)
