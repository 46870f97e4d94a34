"""The generation stage: one request per actor, groups handed on as they complete, cuts and losses made good.

There is one mechanism for a chosen cut, a killed instance, a drained one and a broken connection: what is left of the
share goes into a new request, which finds everything that was published in the sinks of the earlier ones.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless_functions.api import Event, GenerationRequest, Partial, Progress, Samples, SampleTask, Started
from rlhfless_functions.artifacts import join
from rlhfless_operator.platforms.base import InstanceLostError, Platform, TaskFailedError
from rlhfless_operator.training.tasks import check_retry

Key = tuple[int, int]
"""(prompt, index) of a sample."""


@dataclass(frozen=True)
class CompleteGroup:
    """A prompt whose samples are all published."""

    prompt: int
    samples: list[SampleTask]
    lengths: list[int]
    """Response tokens of each sample."""


class Migration(Protocol):
    """Decides, from what the actors say, which of them to cut."""

    def observe(self, actor: int, event: Event) -> None:
        """An actor said something."""

    def should_cut(self, actor: int) -> bool:
        """Whether the actor's share should be closed and its rest moved now; asked after each of its events."""


class NeverCut:
    """The migration policy of a step that runs its shares to the end."""

    def observe(self, actor: int, event: Event) -> None:
        """Nothing is learnt."""

    def should_cut(self, actor: int) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class UndisturbedRun:
    """An actor that went through its whole share in one request."""

    samples: Sequence[SampleTask]
    seconds: float
    """From its first event to its last."""


@dataclass
class GenerationOutcome:
    """What the actors of a step did."""

    sinks: list[str]
    """Folders with rollout parts of this step, of earlier drivers too."""
    lengths: dict[Key, int] = field(default_factory=dict)
    """Response tokens of every finished sample."""
    parts: list[str] = field(default_factory=list)
    """Rollout parts that hold finished samples."""
    lost: int = 0
    """Instances that were lost."""
    cuts: int = 0
    """Shares that were cut by choice."""
    tokens: int = 0
    """Response tokens of finished samples."""
    undisturbed: list[UndisturbedRun] = field(default_factory=list)
    """What the speed of the instances can be learnt from."""


async def generate(
    platform: Platform,
    shares: Sequence[Sequence[SampleTask]],
    make_request: Callable[[str, int, list[SampleTask], str, list[str]], GenerationRequest],
    outcome: GenerationOutcome,
    *,
    sink_root: str,
    driver: int,
    retries: int,
    migration: Migration,
    on_event: Callable[[int, Event], None],
    on_share_done: Callable[[], Awaitable[None]],
) -> AsyncGenerator[CompleteGroup, None]:
    """Run all shares at once and yield each group when its last sample has been published.

    Args:
        shares: the plan's; one actor each.
        make_request: (part, attempt, samples, sink, resume_from) → request.
        outcome: filled in along the way.
        sink_root: folder of the step's sinks.
        driver: number of this driver, so that no two write the same sink.
        retries: losses in a row, without a sample finished in between, that a share survives.
        on_event: told of every event, with the actor's number.
        on_share_done: told when an actor has nothing left, so that its instance can be released.

    Raises:
        StageFailedError: a share can't be finished.
    """
    group_sizes = Counter(sample.prompt for share in shares for sample in share)
    finished: dict[int, dict[int, int]] = {}
    groups: asyncio.Queue[CompleteGroup | None] = asyncio.Queue()
    initial_sinks = len(outcome.sinks)

    def take(samples: Samples) -> None:
        outcome.parts.append(samples.part)
        for sample in samples.samples:
            key = (sample.prompt, sample.index)
            if key in outcome.lengths:
                continue
            outcome.lengths[key] = sample.tokens
            outcome.tokens += sample.tokens
            group = finished.setdefault(sample.prompt, {})
            group[sample.index] = sample.tokens
            if len(group) == group_sizes[sample.prompt]:
                indices = sorted(group)
                tasks = [SampleTask(prompt=sample.prompt, index=index) for index in indices]
                groups.put_nowait(CompleteGroup(sample.prompt, tasks, [group[index] for index in indices]))

    async def run_actor(actor: int, share: Sequence[SampleTask]) -> None:
        attempt = failures = 0
        while rest := [sample for sample in share if (sample.prompt, sample.index) not in outcome.lengths]:
            part = f"actor-{actor:04d}"
            sink = join(sink_root, f"{part}-{driver}-{len(outcome.sinks):04d}")
            first_hand = attempt == 0 and initial_sinks == 0
            request = make_request(part, attempt, rest, sink, list(outcome.sinks))
            outcome.sinks.append(sink)
            attempt += 1
            finished_here = 0
            cut = False
            started_at = math.inf
            try:
                async with aclosing(platform.run(request)) as events:
                    async for event in events:
                        started_at = min(started_at, time.monotonic())
                        if isinstance(event, Samples):
                            finished_here += len(event.samples)
                            take(event)
                        on_event(actor, event)
                        migration.observe(actor, event)
                        if isinstance(event, Started | Progress | Samples | Partial) and migration.should_cut(actor):
                            cut = True
                            break
                if cut:
                    outcome.cuts += 1
                elif finished_here == 0:
                    raise InstanceLostError("the instance was drained before it finished a sample")
                elif first_hand and finished_here == len(share):
                    outcome.undisturbed.append(UndisturbedRun(share, time.monotonic() - started_at))
                failures = 0
            except (InstanceLostError, TaskFailedError) as error:
                failures = 1 if finished_here else failures + 1
                outcome.lost += 1
                check_retry(error, failures, retries, f"generation of step {request.key.step}")
        await on_share_done()

    async def run_all() -> None:
        try:
            async with asyncio.TaskGroup() as actors:
                for number, share in enumerate(shares):
                    actors.create_task(run_actor(number, share))
        finally:
            groups.put_nowait(None)

    running = asyncio.create_task(run_all())
    try:
        while (group := await groups.get()) is not None:
            yield group
        await running
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
