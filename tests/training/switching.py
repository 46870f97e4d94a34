"""Jobs whose generation is still under way when newer weights are published, however fast the machine is.

    python -m tests.training.switching JOB.yaml DEATHS.txt asked continued

runs such a job, and kills itself once at each of these points: when the first request with newer weights is made, and
when the first of their tokens are published.
"""

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rlhfless_functions.api import Event, Partial, Progress, RunRequest, Samples, Started
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.training.asynchronous.rollouts_ahead import RolloutsAhead
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.stages.live_actors import LiveActors
from tests.training.dying_driver import Deaths
from tests.training.whole_jobs import run_job

POINTS = ("asked", "continued")
SAMPLES = 16
"""Samples of a step."""


def step_of(event: Partial | Samples) -> int:
    """The rollout that an event speaks of, from the sink of its share."""
    found = re.search(r"step-0*(\d+)", event.of or "")
    assert found is not None, event.of
    return int(found.group(1))


def switch_midway(points: Collection[str] = (), deaths: Deaths | None = None) -> None:
    """Stop the process of every actor with stale weights once it has published some tokens, and the step before can be
    learnt, until there are newer ones and it is told of them.

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

    finished: Counter[int] = Counter()

    async def held(platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
        if not isinstance(request, LiveRequest):
            async with aclosing(run(platform, request)) as events:
                async for event in events:
                    yield event
            return
        pid, progress, first = None, Progress(finished=0, running=0, waiting=0, tokens=0), request.weights.version
        version = first
        async with aclosing(run(platform, request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    pid = platform._processes[event.instance].pid
                if isinstance(event, Progress):
                    progress, version = event, event.version or version
                if isinstance(event, Samples):
                    finished[step_of(event)] += len(event.samples)
                stale = isinstance(event, Partial) and version < step_of(event) - 1
                if stale and finished[step_of(event) - 1] >= SAMPLES and pid is not None:
                    os.kill(pid, signal.SIGSTOP)
                    try:
                        while journals[-1].published.step <= version:
                            await asyncio.sleep(0.01)
                        # The driver looks around whenever it hears of an actor.
                        yield progress.model_copy(update={"prefetched_version": step_of(event) - 1})
                        reached("asked")
                        await asyncio.sleep(0.2)
                    finally:
                        os.kill(pid, signal.SIGCONT)
                yield event
                if version > first and isinstance(event, Samples | Partial):
                    reached("continued")

    async def never(actors: LiveActors, *rollout: Any, beside: int) -> None:
        # A rollout begins when the one before it is complete, and so with all that it has to decode.
        await asyncio.Event().wait()

    RolloutsAhead.__init__ = noted  # type: ignore[method-assign]
    LiveActors.room = never  # type: ignore[method-assign]
    LocalPlatform.run = held  # type: ignore[method-assign]


if __name__ == "__main__":
    job, dead, where = Path(sys.argv[1]), Deaths(Path(sys.argv[2])), sys.argv[3:]
    switch_midway(where, dead)
    run_job(job)
