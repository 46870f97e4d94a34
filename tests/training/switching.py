"""Jobs whose generation is still under way when newer weights are published, however fast the machine is.

    python -m tests.training.switching JOB.yaml DEATHS.txt asked continued

runs such a job, and kills itself once at each of these points: when the first request with newer weights is made, and
when the first of their tokens are published.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rlhfless_functions.api import Event, GenerationRequest, Partial, Progress, RunRequest, Samples, Started
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.training.asynchronous.rollouts_ahead import RolloutsAhead
from rlhfless_operator.training.costs import cost_model
from rlhfless_operator.training.journal.step_journal import StepJournal
from tests.training.dying_driver import Deaths
from tests.training.whole_jobs import run_job

POINTS = ("asked", "continued")


def switch_midway(points: Collection[str] = (), deaths: Deaths | None = None) -> None:
    """Stop the process of every actor with stale weights once it has published some tokens, until there are newer ones
    and its request is cut for them. Every actor is worth a switch.

    Args:
        points: at which the driver kills itself, once each.
        deaths: writes down where it did.
    """
    journals: list[StepJournal] = []
    begin, run = RolloutsAhead.__init__, LocalPlatform.run

    def noted(ahead: RolloutsAhead, run: Any, journal: StepJournal, *rest: Any) -> None:
        journals.append(journal)
        begin(ahead, run, journal, *rest)

    def reached(point: str) -> None:
        if point in points and deaths is not None and deaths.due(point):
            deaths.happened(point)
            os.kill(os.getpid(), signal.SIGKILL)

    async def held(platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
        generates = isinstance(request, GenerationRequest) and request.purpose == "training"
        stale = generates and request.weights.version < request.key.step - 1
        newer = generates and request.oldest_version is not None and request.weights.version > request.oldest_version
        if newer and request.resume_from:
            reached("asked")
        pid, progress = None, Progress(finished=0, running=0, waiting=0, tokens=0)
        async with aclosing(run(platform, request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    pid = platform._processes[event.instance].pid
                if isinstance(event, Progress):
                    progress = event
                if stale and isinstance(event, Partial) and pid is not None:
                    os.kill(pid, signal.SIGSTOP)
                    try:
                        while journals[-1].published.step <= request.weights.version:
                            await asyncio.sleep(0.01)
                        yield event
                        # It can't prefetch them. The driver looks around whenever it hears of an actor.
                        while True:
                            yield progress.model_copy(update={"prefetched_version": request.key.step - 1})
                            await asyncio.sleep(0.05)
                    finally:
                        os.kill(pid, signal.SIGCONT)
                yield event
                if newer and isinstance(event, Samples | Partial):
                    reached("continued")

    RolloutsAhead.__init__ = noted  # type: ignore[method-assign]
    LocalPlatform.run = held  # type: ignore[method-assign]
    cost_model.is_worth_switching = lambda *arguments: True


if __name__ == "__main__":
    job, dead, where = Path(sys.argv[1]), Deaths(Path(sys.argv[2])), sys.argv[3:]
    switch_midway(where, dead)
    run_job(job)
