"""The generation stage: one request per actor, groups handed on as they complete, moves and losses made good.

One mechanism serves a chosen move, a killed instance, a drained one and a broken connection. The rest of an actor's
samples goes into a new request, which finds everything that was published in the sinks of the earlier ones. An instance
takes one request at a time. So to gather samples on a running actor, it and the others are cut, and one request asks
for all of them. Asynchronous jobs have live actors instead (`live_actors`), and this for evaluations alone.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from rlhfless_functions.api import (
    DecodeCounts,
    Done,
    Event,
    GenerationRequest,
    Partial,
    Progress,
    Samples,
    SampleTask,
    WeightsReference,
)
from rlhfless_functions.artifacts import join
from rlhfless_operator.planner.moves.migration import Migration, Move
from rlhfless_operator.platforms.base import InstanceLostError, Platform, TaskFailedError
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.actors.actor_pool import Actor, ActorPool, Heard, key_of
from rlhfless_operator.training.actors.generated import CompleteGroup, Completion, GenerationOutcome
from rlhfless_operator.training.actors.moves import MoveInProgress
from rlhfless_operator.training.actors.sinks import SinkIndex
from rlhfless_operator.training.instances.away import Away
from rlhfless_operator.training.instances.instance_queue import Part
from rlhfless_operator.training.requests.tasks import check_retry

LOOK_SECONDS = 0.25
"""Least seconds between two looks at whether a move pays."""


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a stage, besides its work."""

    sink_root: str
    """Folder of the step's sinks."""
    driver: int
    """Number of this driver; no two drivers write the same sink."""
    retries: int
    """Losses in a row, without a sample finished in between, that an actor survives."""
    prompt_tokens: Callable[[int], int]
    """Tokens of a prompt."""
    make_request: Callable[[ActorAttempt], GenerationRequest]
    """The request of an actor's attempt."""
    weights: WeightsReference
    """Weights that requests sample with."""
    away: Away | None = None
    """Lets actors go while environments work; None if they are kept."""
    look_seconds: float = LOOK_SECONDS
    """Least seconds between two questions to the migration."""


async def generate(
    platform: Platform,
    shares: Sequence[Sequence[SampleTask]],
    outcome: GenerationOutcome,
    settings: GenerationSettings,
    *,
    migration: Migration,
    instances: Part,
    on_event: Callable[[str, Event], None],
) -> AsyncGenerator[CompleteGroup, None]:
    """Run all shares at once, as far as there are instances, and yield each group when its last sample has been
    published.

    Args:
        shares: the plan's; one actor each.
        outcome: filled in along the way.
        migration: hears all events of the actors, and chooses samples to move.
        instances: gives each share one; hears how many actors have samples left whenever that changes.
        on_event: called with every event and the actor's name.

    Raises:
        StageFailedError: samples can't be finished.
    """
    groups: asyncio.Queue[CompleteGroup | None] = asyncio.Queue()
    completion = Completion(shares, outcome, groups.put_nowait)
    stage = _Stage(platform, outcome, completion, settings, migration, instances, on_event)

    async def run() -> None:
        try:
            await stage.run(shares)
        finally:
            groups.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        while (group := await groups.get()) is not None:
            yield group
        await running
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class _Stage:
    """The generation of one step. Requests run as tasks; their outcomes are settled one after another in `run`."""

    def __init__(
        self,
        platform: Platform,
        outcome: GenerationOutcome,
        completion: Completion,
        settings: GenerationSettings,
        migration: Migration,
        instances: Part,
        on_event: Callable[[str, Event], None],
    ) -> None:
        self._platform = platform
        self._outcome = outcome
        self._completion = completion
        self._settings = settings
        self._migration = migration
        self._instances = instances
        self._on_event = on_event
        self._pool = ActorPool()
        self._sinks = SinkIndex(outcome.before)
        self._move = MoveInProgress()
        self._ended: asyncio.Queue[tuple[Actor, bool]] = asyncio.Queue()
        self._tasks = asyncio.TaskGroup()
        self._told = 0
        """Number of actors with work that was told last."""

    async def run(self, shares: Sequence[Sequence[SampleTask]]) -> None:
        async with self._tasks:
            for share in shares:
                actor = self._pool.open(share)
                tokens = {key_of(sample): self._settings.prompt_tokens(sample.prompt) for sample in share}
                self._migration.assigned(actor.name, tokens)
            for actor in self._pool:
                self._go_on(actor)
            self._told = len(shares)
            await self._tell_left()
            while self._pool:
                self._settle(*await self._ended.get())
                await self._tell_left()

    # --- the outcome of an actor's request ---

    def _go_on(self, actor: Actor) -> None:
        """Request the rest of an actor's samples, or release an actor that has none."""
        actor.keep_unfinished(self._outcome.lengths.keys())
        if actor.samples:
            actor.request = self._tasks.create_task(self._request(actor))
            # This also runs for a request that is cut before its task has begun.
            actor.request.add_done_callback(lambda request: self._ended.put_nowait((actor, _was_lost(request))))
        else:
            self._pool.release(actor)
            if actor.has_instance:
                self._instances.give(left=self._left)

    def _settle(self, actor: Actor, lost: bool) -> None:
        """Settle a request that has ended, in any way."""
        if self._move.involves(actor.name):
            if self._move.ended(actor.name):
                self._regroup()
            return
        if lost and (rest := self._migration.lost(actor.name)) is not None:
            tokens = self._settings.prompt_tokens
            kept = {key: (tokens(key[0]), self._sinks.published_tokens(key)) for key in rest.samples}
            self._migration.resumed(actor.name, kept)
        self._go_on(actor)

    async def _request(self, actor: Actor) -> bool:
        """Send one request and follow it to its end; return whether its instance was lost."""
        away = self._settings.away
        if actor.all_wait and away is not None:
            await self._let_go(actor, away)
        shelter = await away.shelter() if away is not None else None
        if not actor.has_instance:
            await self._instances.turn()
            actor.has_instance = True
        began = time.monotonic()
        sink = join(self._settings.sink_root, f"{actor.name}-{self._settings.driver}-{len(self._outcome.sinks):04d}")
        keys = [key_of(sample) for sample in actor.samples]
        places = self._sinks.places(keys)
        weights = self._settings.weights
        attempt = ActorAttempt(
            actor.name, actor.attempts, weights, actor.samples, sink, places.resume_from, places.known_until, shelter
        )
        request = self._settings.make_request(attempt)
        self._outcome.sinks.append(sink)
        self._sinks.opened(sink, keys)
        actor.attempts += 1
        held = self._migration.actors[actor.name].samples
        heard = Heard({key: held[key].tokens for key in keys})
        error: InstanceLostError | TaskFailedError | None = None
        try:
            async with aclosing(self._platform.run(request)) as events:
                async for event in events:
                    self._take(actor, event, heard, sink)
                    self._look()
            if heard.finished == 0 and not actor.all_wait:
                error = InstanceLostError("the instance was drained before it finished a sample")
        except (InstanceLostError, TaskFailedError) as failure:
            error = failure
        finally:
            # This includes a request that was cut: closing its stream has let the instance publish what it had.
            self._outcome.decoded(heard.decoding)
            self._outcome.held_seconds += time.monotonic() - began
            if stretch := heard.stretch():
                self._outcome.stretches.append(stretch)
        actor.cut_at = None
        if error is not None:
            actor.failures = 1 if heard.finished else actor.failures + 1
            self._outcome.lost += 1
            check_retry(error, actor.failures, self._settings.retries, f"generation of step {request.key.step}")
        elif heard.finished:
            actor.failures = 0
        return error is not None

    def _take(self, actor: Actor, event: Event, heard: Heard, sink: str) -> None:
        if isinstance(event, Progress):
            lengths = {(prompt, index): tokens for prompt, index, tokens in event.lengths}
            heard.now(lengths)
            if event.room is not None:
                self._outcome.has_room(event.room)
            heard.decoding = event.decoding
            self._migration.progressed(actor.name, lengths)
        elif isinstance(event, Samples):
            heard.finished += len(event.samples)
            # Samples that an earlier request had finished are announced again. They say nothing of this one's speed.
            if event.part.startswith(sink):
                self._sinks.finished(sink, event)
                heard.now({(each.prompt, each.index): each.tokens for each in event.samples})
            self._migration.finished(actor.name, self._completion.take(event))
        elif isinstance(event, Partial):
            self._sinks.flushed(sink, event)
        elif isinstance(event, Done):
            self._outcome.done(event)
            actor.all_wait = bool(event.result.get("all_wait"))
            heard.waited = event.result.get("waited_seconds", 0.0)
            heard.decoding = DecodeCounts.model_validate(event.result.get("decoding", {}))
            heard.prefixes = event.result.get("shared_prefixes", {})
        if actor.cut_at is not None and heard.first < math.inf:
            self._outcome.pauses.append(heard.first - actor.cut_at)
            actor.cut_at = None
        self._on_event(actor.name, event)

    # --- actors whose samples all wait ---

    @property
    def _left(self) -> int:
        """Number of actors that have work, or will have it without waiting for environments."""
        return sum(not actor.all_wait for actor in self._pool)

    async def _tell_left(self) -> None:
        if self._left != self._told:
            self._told = self._left
            await self._instances.has_left(self._told)

    async def _let_go(self, actor: Actor, away: Away) -> None:
        """Let an actor's instance go until an environment has answered one of its samples."""
        began = time.monotonic()
        if actor.has_instance:
            actor.has_instance = False
            self._instances.give(left=self._left)
            await self._tell_left()
            await self._instances.let_go()
        await away.come([key_of(sample) for sample in actor.samples])
        self._outcome.let_go_seconds += time.monotonic() - began
        actor.all_wait = False
        await self._tell_left()

    # --- chosen cuts ---

    def _look(self) -> None:
        """Ask whether samples should move; if so, cut every actor involved."""
        now, look_seconds = time.monotonic(), self._settings.look_seconds
        if not self._move.may_look(now):
            return
        if any(actor.cut_at is not None or not actor.has_instance for actor in self._pool):
            # An actor that was cut and has not resumed yet would only read the same parts once more. One that waits for
            # an instance can neither be cut nor given more.
            self._move.look_again_at(now + look_seconds)
            return
        self._move.begin(self._migration.decide(now), now, look_seconds)
        for name in self._move.involved:
            self._outcome.cuts += _cut(self._pool[name], now)

    def _regroup(self) -> None:
        """Hand the samples over and resume, once every actor of the moves has published what it had."""
        opened = []
        for move in self._move.moves:
            source = self._pool[move.source]
            source.keep_unfinished(self._outcome.lengths.keys())
            wanted = set(move.samples)
            keys = tuple(key for key in map(key_of, source.samples) if key in wanted)
            if not keys:
                continue
            if move.destination is None:
                target = self._pool.open([])
                target.cut_at = source.cut_at
                self._instances.take()
                target.has_instance = True
                opened.append(target)
            else:
                target = self._pool[move.destination]
            source.give(keys, target)
            self._outcome.moved += len(keys)
            self._migration.moved(Move(move.source, keys, move.destination), target.name)
        for actor in [*(self._pool[name] for name in self._move.involved), *opened]:
            view = self._migration.actors.get(actor.name)
            if view is not None:
                # The longest are admitted first, as in the plan.
                expected = {key: sample.remaining for key, sample in view.samples.items()}
                actor.samples.sort(key=lambda sample: -expected.get(key_of(sample), 0.0))
            self._go_on(actor)
        self._move.finish()


def _cut(actor: Actor, now: float) -> bool:
    """Cut an actor's request, unless it has ended already."""
    assert actor.request is not None
    cut = actor.request.cancel()
    if cut:
        actor.cut_at = now
    return cut


def _was_lost(request: asyncio.Task[bool]) -> bool:
    return not request.cancelled() and request.exception() is None and request.result()
