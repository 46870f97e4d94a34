"""The generation stage: one request per actor, groups handed on as they complete, moves and losses made good.

There is one mechanism for a chosen move, a killed instance, a drained one and a broken connection: what is left of an
actor's samples goes into a new request, which finds everything that was published in the sinks of the earlier ones.
An instance takes one request at a time, so that to gather samples on a running actor is to cut it and the others, and
to ask once for all of it.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from rlhfless_functions.api import Done, Event, GenerationRequest, Partial, Progress, Samples, SampleTask
from rlhfless_functions.artifacts import join
from rlhfless_operator.planner.migration import Key, Migration, Move
from rlhfless_operator.platforms.base import InstanceLostError, Platform, TaskFailedError
from rlhfless_operator.training.generated import CompleteGroup, Completion, GenerationOutcome, Stretch
from rlhfless_operator.training.tasks import check_retry

LOOK_SECONDS = 0.25
"""Least time between two looks at whether a move is worth it."""

_LOOK_SHARE = 0.05
"""Most of the driver's time that may go into such looks."""

RequestMaker = Callable[[str, int, list[SampleTask], str, list[str], dict[str, str]], GenerationRequest]
"""(part, attempt, samples, sink, resume_from, known_until) → request."""


@dataclass(frozen=True)
class GenerationSettings:
    """What a stage is told besides its work."""

    sink_root: str
    """Folder of the step's sinks."""
    driver: int
    """Number of this driver, so that no two write the same sink."""
    retries: int
    """Losses in a row, without a sample finished in between, that an actor survives."""
    prompt_tokens: Callable[[int], int]
    """Tokens of a prompt."""
    look_seconds: float = LOOK_SECONDS
    """Least time between two questions to the migration."""


async def generate(
    platform: Platform,
    shares: Sequence[Sequence[SampleTask]],
    make_request: RequestMaker,
    outcome: GenerationOutcome,
    settings: GenerationSettings,
    *,
    migration: Migration,
    on_event: Callable[[int, Event], None],
    on_actors: Callable[[int], Awaitable[None]],
) -> AsyncGenerator[CompleteGroup, None]:
    """Run all shares at once and yield each group when its last sample has been published.

    Args:
        shares: the plan's; one actor each.
        outcome: filled in along the way.
        migration: told of everything that the actors say, and asked which samples to move where.
        on_event: told of every event, with the actor's number.
        on_actors: told how many actors have anything left whenever that changes, so that instances can be released.

    Raises:
        StageFailedError: samples can't be finished.
    """
    groups: asyncio.Queue[CompleteGroup | None] = asyncio.Queue()
    completion = Completion(shares, outcome, groups.put_nowait)
    stage = _Stage(platform, make_request, outcome, completion, settings, migration, on_event, on_actors)

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


@dataclass
class _Actor:
    number: int
    samples: list[SampleTask]
    """What it holds, in the order of admission; those that are finished are still among them."""
    request: asyncio.Task[bool] | None = None
    attempts: int = 0
    failures: int = 0
    """Losses in a row without a sample finished in between."""
    cut_at: float | None = None
    """When its request was cut by choice; None once it goes on."""

    @property
    def name(self) -> str:
        return f"actor-{self.number:04d}"


@dataclass
class _Heard:
    """What one request has said of its samples."""

    begun: dict[Key, int]
    tokens: dict[Key, int] = field(default_factory=dict)
    finished: int = 0
    first: float = math.inf
    last: float = -math.inf

    def now(self, tokens: dict[Key, int]) -> None:
        """It generates, and has come so far: the first time, before it has decoded anything."""
        self.tokens.update(tokens)
        self.last = time.monotonic()
        self.first = min(self.first, self.last)

    def stretch(self) -> Stretch | None:
        if self.last <= self.first or not self.tokens:
            return None
        return Stretch({key: self.begun.get(key, 0) for key in self.tokens}, self.tokens, self.last - self.first)


class _Stage:
    """The actors of one step. Requests run as tasks; what they come to is settled one after another in `run`."""

    def __init__(
        self,
        platform: Platform,
        make_request: RequestMaker,
        outcome: GenerationOutcome,
        completion: Completion,
        settings: GenerationSettings,
        migration: Migration,
        on_event: Callable[[int, Event], None],
        on_actors: Callable[[int], Awaitable[None]],
    ) -> None:
        self._platform = platform
        self._make_request = make_request
        self._outcome = outcome
        self._completion = completion
        self._settings = settings
        self._migration = migration
        self._on_event = on_event
        self._on_actors = on_actors
        self._actors: dict[str, _Actor] = {}
        self._numbers = 0
        self._ended: asyncio.Queue[tuple[_Actor, bool]] = asyncio.Queue()
        self._moves: list[Move] = []
        self._closing: set[str] = set()
        self._involved: list[str] = []
        self._published: dict[Key, int] = {}
        self._sinks_before = list(outcome.sinks)
        self._sinks_of: dict[Key, list[str]] = defaultdict(list)
        self._known_until: dict[str, str] = {}
        self._partials_of: dict[str, str] = {}
        self._look_at = -math.inf
        self._tasks = asyncio.TaskGroup()

    async def run(self, shares: Sequence[Sequence[SampleTask]]) -> None:
        async with self._tasks:
            for share in shares:
                actor = self._open(share)
                tokens = self._settings.prompt_tokens
                self._migration.assigned(
                    actor.name, {(sample.prompt, sample.index): tokens(sample.prompt) for sample in share}
                )
            for actor in list(self._actors.values()):
                self._go_on(actor)
            told = len(self._actors)
            while self._actors:
                self._settle(*await self._ended.get())
                if len(self._actors) != told:
                    told = len(self._actors)
                    await self._on_actors(told)

    # --- what an actor's request comes to ---

    def _open(self, samples: Sequence[SampleTask]) -> _Actor:
        actor = _Actor(self._numbers, list(samples))
        self._numbers += 1
        self._actors[actor.name] = actor
        return actor

    def _go_on(self, actor: _Actor) -> None:
        """Ask for what an actor has left; one with nothing left is released."""
        actor.samples = [sample for sample in actor.samples if _key(sample) not in self._outcome.lengths]
        if actor.samples:
            actor.request = self._tasks.create_task(self._request(actor))
            # Also called for a request that is cut before its task has begun.
            actor.request.add_done_callback(lambda request: self._ended.put_nowait((actor, _was_lost(request))))
        else:
            del self._actors[actor.name]

    def _settle(self, actor: _Actor, lost: bool) -> None:
        """A request has ended, in whatever way."""
        if actor.name in self._closing:
            self._closing.discard(actor.name)
            if not self._closing:
                self._regroup()
            return
        if lost and (move := self._migration.lost(actor.name)) is not None:
            kept = {key: (self._settings.prompt_tokens(key[0]), self._published.get(key, 0)) for key in move.samples}
            self._migration.resumed(actor.name, kept)
        self._go_on(actor)

    async def _request(self, actor: _Actor) -> bool:
        """One request, from its start to whatever ends it; returns whether its instance was lost."""
        sink = join(self._settings.sink_root, f"{actor.name}-{self._settings.driver}-{len(self._outcome.sinks):04d}")
        keys = [_key(sample) for sample in actor.samples]
        earlier = dict.fromkeys(name for key in keys for name in self._sinks_of[key])
        # Of the parts that were heard of, only a sink's newest with unfinished samples has anything to go on with.
        partials = [self._partials_of[name] for name in earlier if name in self._partials_of]
        known = {name: self._known_until[name] for name in earlier if name in self._known_until}
        places = [*self._sinks_before, *earlier, *partials]
        request = self._make_request(actor.name, actor.attempts, actor.samples, sink, places, known)
        self._outcome.sinks.append(sink)
        for key in keys:
            self._sinks_of[key].append(sink)
        actor.attempts += 1
        held = self._migration.actors[actor.name].samples
        heard = _Heard({key: held[key].tokens for key in keys})
        error: InstanceLostError | TaskFailedError | None = None
        try:
            async with aclosing(self._platform.run(request)) as events:
                async for event in events:
                    self._take(actor, event, heard, sink)
                    if actor.cut_at is not None and heard.first < math.inf:
                        self._outcome.pauses.append(heard.first - actor.cut_at)
                        actor.cut_at = None
                    self._on_event(actor.number, event)
                    self._look()
            if heard.finished == 0:
                error = InstanceLostError("the instance was drained before it finished a sample")
        except (InstanceLostError, TaskFailedError) as failure:
            error = failure
        finally:
            # Of a request that was cut, too: closing its stream has let the instance publish what it had.
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

    def _take(self, actor: _Actor, event: Event, heard: _Heard, sink: str) -> None:
        if isinstance(event, Progress):
            lengths = {(prompt, index): tokens for prompt, index, tokens in event.lengths}
            heard.now(lengths)
            self._migration.progressed(actor.name, lengths)
        elif isinstance(event, Samples):
            heard.finished += len(event.samples)
            # What an earlier request had finished is announced again, and says nothing of this one's speed.
            if event.part.startswith(sink):
                self._known_until[sink] = event.part
                heard.now({(each.prompt, each.index): each.tokens for each in event.samples})
            self._migration.finished(actor.name, self._completion.take(event))
        elif isinstance(event, Partial):
            self._known_until[sink] = self._partials_of[sink] = event.part
            for each in event.samples:
                key = (each.prompt, each.index)
                self._published[key] = each.tokens
                # It holds all that earlier sinks do.
                self._sinks_of[key] = [sink]
        elif isinstance(event, Done):
            self._outcome.prefixes.update(event.result.get("shared_prefixes", {}))
            taken = event.result.get("weights_seconds", 0.0)
            self._outcome.weights_seconds = max(self._outcome.weights_seconds, taken)

    # --- chosen moves ---

    def _look(self) -> None:
        """Ask whether anything should move; if so, cut whoever is part of it."""
        now = time.monotonic()
        if self._involved or now < self._look_at:
            return
        if any(actor.cut_at is not None for actor in self._actors.values()):
            # To cut whoever has not gone on yet would be to read the same parts once more, and to gain nothing by it.
            self._look_at = now + self._settings.look_seconds
            return
        self._moves = self._migration.decide(now)
        # Where there is so much to look at that it takes long, it is looked at less often.
        took = time.monotonic() - now
        self._look_at = now + max(self._settings.look_seconds, took / _LOOK_SHARE)
        involved = {name: None for move in self._moves for name in (move.source, move.destination) if name is not None}
        self._involved = list(involved)
        for name in self._involved:
            actor = self._actors[name]
            self._closing.add(name)
            assert actor.request is not None
            if actor.request.cancel():
                actor.cut_at = now
                self._outcome.cuts += 1

    def _regroup(self) -> None:
        """Everybody who is part of the moves has published what it had: hand the samples over, and go on."""
        opened = []
        for move in self._moves:
            source = self._actors[move.source]
            wanted = set(move.samples)
            moving = [
                sample
                for sample in source.samples
                if _key(sample) in wanted and _key(sample) not in self._outcome.lengths
            ]
            if not moving:
                continue
            if move.destination is None:
                target = self._open([])
                target.cut_at = source.cut_at
                opened.append(target)
            else:
                target = self._actors[move.destination]
            keys = {_key(sample) for sample in moving}
            source.samples = [sample for sample in source.samples if _key(sample) not in keys]
            target.samples += moving
            self._outcome.moved += len(moving)
            self._migration.moved(Move(move.source, tuple(keys), move.destination), target.name)
        for actor in [*(self._actors[name] for name in self._involved), *opened]:
            view = self._migration.actors.get(actor.name)
            if view is not None:
                # The longest are admitted first, as the planner would have it.
                expected = {key: sample.remaining for key, sample in view.samples.items()}
                actor.samples.sort(key=lambda sample: -expected.get(_key(sample), 0.0))
            self._go_on(actor)
        self._moves, self._involved = [], []


def _was_lost(request: asyncio.Task[bool]) -> bool:
    return not request.cancelled() and request.exception() is None and request.result()


def _key(sample: SampleTask) -> Key:
    return sample.prompt, sample.index
