"""The generation stage of a rollout with actors of its own: groups handed on as they complete, moves and losses.

Each actor is one live request (`api/live.py`). A chosen move takes the samples of an actor back, whose instance
publishes them and is free, and adds them to the batch of another, which goes on decoding meanwhile. A killed instance,
a drained one and a broken connection end a request. The rest of its samples goes into a new one, which finds everything
that was published in the sinks of the earlier ones. Rollouts of asynchronous jobs share actors instead
(`live_actors`); their evaluations are generated here.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from rlhfless_functions.api import (
    DecodeCounts,
    Done,
    Event,
    Failed,
    Leave,
    LiveBatch,
    Partial,
    Progress,
    Samples,
    SampleTask,
    Shelter,
)
from rlhfless_functions.artifacts import join
from rlhfless_operator.planner.moves.migration import MOST_GROWTH, Key, Migration, Move
from rlhfless_operator.platforms.base import InstanceLostError, Platform, TaskFailedError
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.actors.generated import CompleteGroup, Completion, GenerationOutcome, grouped
from rlhfless_operator.training.actors.heard import Heard, key_of
from rlhfless_operator.training.actors.looks import pause_after
from rlhfless_operator.training.actors.rollout_actor import RolloutActor
from rlhfless_operator.training.actors.sinks import SinkIndex
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.instances.away import Away
from rlhfless_operator.training.instances.instance_queue import Part
from rlhfless_operator.training.requests.tasks import check_retry
from rlhfless_operator.training.stages.generation_settings import GenerationSettings


async def generate(
    platform: Platform,
    shares: Sequence[Sequence[SampleTask]],
    outcome: GenerationOutcome,
    settings: GenerationSettings,
    *,
    migration: Migration,
    instances: Part,
    on_event: Callable[[str, Event], None],
    arrivals: AsyncIterator[GenerationPlan] | None = None,
) -> AsyncGenerator[CompleteGroup, None]:
    """Run all shares at once, as far as there are instances, and yield each group when its last sample has been
    published.

    Args:
        shares: the plan's; one actor each.
        outcome: filled in along the way.
        migration: hears all events of the actors, and chooses samples to move.
        instances: gives each share one; hears how many actors have samples left whenever that changes.
        on_event: called with every event and the actor's name.
        arrivals: plans of further groups, which join the batches of running actors. The last one ends it.

    Raises:
        StageFailedError: samples can't be finished.
    """
    groups: asyncio.Queue[CompleteGroup | None] = asyncio.Queue()
    completion = Completion(shares, outcome, groups.put_nowait)
    stage = _Stage(platform, outcome, completion, settings, migration, instances, on_event)

    async def run() -> None:
        try:
            await stage.run(shares, arrivals)
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
    """The generation of one rollout. Each actor is a task."""

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
        self._actors: dict[str, RolloutActor] = {}
        """Actors that have samples left, by name. Numbers are never used twice."""
        self._numbers = itertools.count()
        self._sinks = SinkIndex(outcome.before)
        self._tasks = asyncio.TaskGroup()
        self._most = LiveBatch(sequences=1, prompt_tokens=1)
        """The largest batch that moves make."""
        self._told = 0
        """Number of actors with work that was told last."""
        self._look_at = 0.0
        """Time before which the migration is not asked again."""
        self._moved_at = 0.0
        """Time of the last decision to move samples."""

    async def run(self, shares: Sequence[Sequence[SampleTask]], arrivals: AsyncIterator[GenerationPlan] | None) -> None:
        tokens, largest = self._settings.prompt_tokens, max(map(len, shares))
        self._most = LiveBatch(
            # Those beyond wait in the instance.
            sequences=max(min(self._settings.slots, MOST_GROWTH * largest), largest if arrivals is not None else 1),
            prompt_tokens=max(
                self._settings.longest_prompt, *(tokens(sample.prompt) for share in shares for sample in share)
            ),
        )
        self._told = len(shares)
        async with self._tasks:
            for share in shares:
                self._assign(self._open(share), share)
            if arrivals is not None:
                self._tasks.create_task(self._take_in(arrivals))

    def _assign(self, actor: RolloutActor, samples: Sequence[SampleTask]) -> None:
        tokens = self._settings.prompt_tokens
        self._migration.assigned(actor.name, {key_of(sample): tokens(sample.prompt) for sample in samples})

    async def _take_in(self, arrivals: AsyncIterator[GenerationPlan]) -> None:
        """Add the groups that arrive to the batches of running actors, and to new ones if their plan wants more."""
        async for plan in arrivals:
            self._completion.expect(plan.shares)
            staying = [actor for actor in self._actors.values() if not actor.moves]
            # A request that has ended takes in no more. An actor without one may wait for long.
            actors = [actor for actor in staying if actor.request is not None] or staying
            wanted = min(len(plan.shares) - len(actors), self._instances.actors - len(self._actors))
            actors += [self._open([]) for _ in range(max(wanted, 0 if actors else 1))]
            for group in grouped(plan.shares):
                actor = min(actors, key=self._unfinished)
                self._assign(actor, group)
                self._add(actor, group, time.monotonic())
            await self._tell_left()

    def _unfinished(self, actor: RolloutActor) -> int:
        held = self._migration.actors.get(actor.name)
        return 0 if held is None else len(held.samples)

    def _open(self, samples: Sequence[SampleTask]) -> RolloutActor:
        actor = RolloutActor(next(self._numbers), list(samples))
        self._actors[actor.name] = actor
        self._tasks.create_task(self._serve(actor))
        return actor

    # --- an actor ---

    async def _serve(self, actor: RolloutActor) -> None:
        """Make requests until an actor has nothing left, and release it."""
        while self._has_more(actor):
            await self._request(actor)
        del self._actors[actor.name]
        if actor.has_instance:
            self._instances.give(left=self._left)
        await self._tell_left()

    def _has_more(self, actor: RolloutActor) -> bool:
        return actor.keep_unfinished(self._outcome.lengths.keys())

    async def _request(self, actor: RolloutActor) -> None:
        """Send one request for the rest of an actor's samples, and follow it to its end."""
        away = self._settings.away
        if actor.all_wait and away is not None:
            await self._let_go(actor, away)
        shelter = await away.shelter() if away is not None else None
        if not actor.has_instance:
            await self._instances.turn()
            actor.has_instance = True
        began, request = time.monotonic(), self._request_of(actor, shelter)
        heard = actor.heard
        error: InstanceLostError | TaskFailedError | None = None
        try:
            async with aclosing(self._platform.run(request)) as events:
                async for event in events:
                    self._take(actor, event)
                    self._look()
            if actor.request is not None and not (heard.finished or heard.all_wait):
                error = InstanceLostError("the instance was drained before it finished a sample")
        except (InstanceLostError, TaskFailedError) as failure:
            error = failure
        finally:
            actor.request = actor.joins_since = None
            self._outcome.decoded(heard.decoding)
            self._outcome.held_seconds += time.monotonic() - began
            if stretch := heard.stretch():
                self._outcome.stretches.append(stretch)
        if error is not None:
            # Tokens that it had not published are lost.
            self._migration.progressed(actor.name, self._published(actor))
        self._hand_over(actor)
        if not self._has_more(actor):
            return
        if error is not None and (rest := self._migration.lost(actor.name)) is not None:
            prompt_tokens, published = self._settings.prompt_tokens, self._published(actor)
            kept = {key: (prompt_tokens(key[0]), published[key]) for key in rest.samples}
            self._migration.resumed(actor.name, kept)
        if error is not None:
            actor.failures = 1 if heard.finished else actor.failures + 1
            self._outcome.lost += 1
            check_retry(error, actor.failures, self._settings.retries, f"generation of step {request.key.step}")
        elif heard.finished:
            actor.failures = 0

    def _published(self, actor: RolloutActor) -> dict[Key, int]:
        """Return the number of stored response tokens of each of an actor's samples."""
        return {key: self._sinks.published_tokens(key) for key in map(key_of, actor.samples)}

    def _request_of(self, actor: RolloutActor, shelter: Shelter | None) -> LiveRequest:
        """Open a request for an actor's samples."""
        sink = join(self._settings.sink_root, f"{actor.name}-{self._settings.driver}-{len(self._outcome.sinks):04d}")
        keys = [key_of(sample) for sample in actor.samples]
        places, weights = self._sinks.places(keys), self._settings.weights
        attempt = ActorAttempt(
            actor.name, actor.attempts, weights, actor.samples, sink, places.resume_from, places.known_until, shelter
        )
        live = self._most.model_copy(update={"sequences": max(self._most.sequences, len(keys))})
        request = LiveRequest.of(self._settings.make_request(attempt).model_copy(update={"live": live}))
        self._outcome.sinks.append(sink)
        self._sinks.opened(sink, keys)
        held = self._migration.actors[actor.name].samples
        actor.request, actor.sink, actor.sent, actor.all_wait = request, sink, len(keys), False
        actor.heard = Heard({key: held[key].tokens for key in keys})
        actor.attempts += 1
        return request

    def _take(self, actor: RolloutActor, event: Event) -> None:
        heard = actor.heard
        if isinstance(event, Failed):
            raise TaskFailedError(event)
        if isinstance(event, Progress):
            lengths = {(prompt, index): tokens for prompt, index, tokens in event.lengths}
            if lengths or not heard.is_begun:
                heard.now(lengths)
            if event.room is not None:
                self._outcome.has_room(event.room)
            heard.decoding = event.decoding
            self._migration.progressed(actor.name, lengths)
            self._has_received(actor, event.received or 0)
        elif isinstance(event, Samples):
            heard.finished += len(event.samples)
            # Samples that an earlier request had finished are announced again. They say nothing of this one's speed.
            if event.part.startswith(actor.sink):
                self._sinks.finished(actor.sink, event)
                heard.now({(each.prompt, each.index): each.tokens for each in event.samples})
            self._migration.finished(actor.name, self._completion.take(event))
            self._end_if_done(actor)
        elif isinstance(event, Partial):
            self._sinks.flushed(actor.sink, event)
        elif isinstance(event, Done):
            if event.of is not None:
                # Its share is stored. The whole request's own event follows.
                self._hand_over(actor)
                return
            self._outcome.done(event)
            heard.all_wait = bool(event.result.get("all_wait"))
            # Samples that are on their way to it need not wait for environments.
            actor.all_wait = heard.all_wait and actor.joins_since is None and not actor.expected
            heard.waited = event.result.get("waited_seconds", 0.0)
            heard.decoding = DecodeCounts.model_validate(event.result.get("decoding", {}))
            heard.prefixes = event.result.get("shared_prefixes", {})
        self._on_event(actor.name, event)

    def _end_if_done(self, actor: RolloutActor) -> None:
        """End an actor's request if it has nothing left, and no move will bring it more."""
        if not actor.expected and not self._has_more(actor):
            actor.end()

    # --- actors whose samples all wait ---

    @property
    def _left(self) -> int:
        """Number of actors that have work, or will have it without waiting for environments."""
        return sum(not actor.all_wait for actor in self._actors.values())

    async def _tell_left(self) -> None:
        if self._left != self._told:
            self._told = self._left
            await self._instances.has_left(self._told)

    async def _let_go(self, actor: RolloutActor, away: Away) -> None:
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

    # --- moves ---

    def _look(self) -> None:
        """Ask whether samples should move; if so, take them back from the actors that have them."""
        now, look_seconds = time.monotonic(), self._settings.look_seconds
        if now < self._look_at:
            return
        if any(
            actor.request is None or not actor.heard.is_begun or actor.joins_since is not None
            for actor in self._actors.values()
        ):
            # An actor whose request no instance has begun has no batch to take samples from or to add them to. One that
            # still reads what it was given would only read the same parts once more.
            self._look_at = now + look_seconds
            return
        moves = self._migration.decide(now)
        # Questions that take long are asked less often.
        self._look_at = now + max(look_seconds, pause_after(time.monotonic() - now))
        self._moved_at = now
        for move in moves:
            source = self._actors[move.source]
            source.moves.append(move)
            if move.destination is not None:
                self._actors[move.destination].expected += 1
            if source.request is not None:
                source.request.send(Leave(sink=source.sink))
                source.end()
                self._outcome.cuts += 1

    def _hand_over(self, source: RolloutActor) -> None:
        """Give samples to the actors that they move to, once the source has published what it had."""
        moves, source.moves = source.moves, []
        self._has_more(source)
        for move in moves:
            target = self._actors.get(move.destination or "")
            if target is not None:
                target.expected -= 1
            if samples := source.give(set(move.samples)):
                self._receive(target or self._open([]), move.source, samples)
            elif target is not None:
                self._end_if_done(target)

    def _receive(self, target: RolloutActor, source: str, samples: list[SampleTask]) -> None:
        keys = tuple(map(key_of, samples))
        self._outcome.moved += len(keys)
        self._migration.moved(Move(source, keys, target.name), target.name)
        held = self._migration.actors[target.name].samples
        # The longest are admitted first, as in the plan.
        samples.sort(key=lambda sample: -held[key_of(sample)].remaining)
        self._add(target, samples, self._moved_at)

    def _add(self, target: RolloutActor, samples: Sequence[SampleTask], since: float) -> None:
        """Add samples to an actor, and to its batch if it has one.

        Args:
            since: time at which that was decided.
        """
        target.samples = [*target.samples, *samples]
        if target.request is not None:
            held = self._migration.actors[target.name].samples
            keys = map(key_of, samples)
            target.heard.begun.update({key: max(held[key].tokens, self._sinks.published_tokens(key)) for key in keys})
            target.request.send(self._sinks.add(target.sink, samples))
            target.sent += len(samples)
            target.joins_since = since

    def _has_received(self, actor: RolloutActor, samples: int) -> None:
        """Note how many samples an actor's instance has taken in."""
        if actor.joins_since is not None and samples >= actor.sent:
            self._outcome.pauses.append(time.monotonic() - actor.joins_since)
            actor.joins_since = None
