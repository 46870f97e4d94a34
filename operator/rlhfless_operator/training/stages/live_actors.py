"""The live actors of an asynchronous job: their batches go on from rollout to rollout.

Each actor is one request whose body stays open (`api/live.py`). Groups wait here, and go to actors one by one, as soon
as a batch has places for them: those of the earliest rollout first, to the actor with the fewest samples. So a batch is
full as long as groups wait, and a group is assigned late. When newer weights are written down, each actor swaps them in
between two passes. An actor without samples ends once no groups wait.

A lost actor's samples wait again, before all others, and are continued from what it had published.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress

from rlhfless_functions.api import (
    DecodeCounts,
    Done,
    Event,
    Failed,
    Join,
    Leave,
    LiveBatch,
    NewWeights,
    NextWeights,
    Progress,
    SampleTask,
    Started,
    WeightsReference,
)
from rlhfless_operator.platforms.base import InstanceLostError, Platform, TaskFailedError
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.training.actors.actor_pool import Heard, key_of
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.live_actor import LiveActor, Share, Weights
from rlhfless_operator.training.actors.live_rollout import LiveRollout
from rlhfless_operator.training.instances.instance_queue import InstanceQueue
from rlhfless_operator.training.requests.tasks import check_retry

WINDOW_SECONDS = 5.0
"""Least seconds of generation from which the instances' speed is learnt."""
LONGEST_SECONDS = 300.0
"""Seconds after which an actor is cut, and another one goes on with its samples. Clusters limit the length of a
request, by default to twice as long (`knative.requestTimeout`)."""


class LiveActors:
    """The live actors of a job.

    Args:
        platform: runs the instances.
        queue: gives each actor an instance.
        weights: the weights to decode with.
        prompt_tokens: tokens of the longest prompt of the dataset.
    """

    def __init__(self, platform: Platform, queue: InstanceQueue, weights: Weights, prompt_tokens: int) -> None:
        self._platform = platform
        self._queue = queue
        self._weights = weights
        self._prompt_tokens = prompt_tokens
        self._count = 1
        self._places = 1
        self._rollouts: list[LiveRollout] = []
        self._newest = 0
        """Number of the newest rollout that has begun."""
        self._actors: dict[LiveActor, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._measured = GenerationOutcome(sinks=[])

    # --- rollouts ---

    @asynccontextmanager
    async def generating(self, rollout: LiveRollout, actors: int, places: int) -> AsyncIterator[None]:
        """Generate a rollout until this is left. Its outcome then has what was measured meanwhile.

        Args:
            actors: number of actors from now on.
            places: samples in the batch of each from now on.
        """
        self._count, self._places = actors, max(places, *(len(group) for group in rollout.waiting), 1)
        self._rollouts.append(rollout)
        self._newest = max(self._newest, rollout.settings.step)
        self._rollouts.sort(key=lambda each: each.settings.step)
        self._deal()
        try:
            yield
        finally:
            self._rollouts.remove(rollout)
            for actor, sink in list(self._shares_of(rollout)):
                del actor.shares[sink]
                if actor.request is not None:
                    actor.request.send(Leave(sink=sink))
            self._deal()
            self._report(rollout.outcome)

    @property
    def running(self) -> int:
        """Number of actors."""
        return len(self._actors)

    async def room(self, *, beside: int) -> None:
        """Wait until rollout `beside` has begun, and a group more would begin at once."""
        while self._newest < beside or self._waiting or not self._has_place:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Cut all actors. Their instances publish what they have."""
        tasks = list(self._actors.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- assignment ---

    @property
    def _waiting(self) -> int:
        """Number of samples that no actor has."""
        return sum(len(group) for rollout in self._rollouts for group in rollout.waiting)

    @property
    def _has_place(self) -> bool:
        return len(self._actors) < self._count or self._least_loaded(1) is not None

    def _deal(self) -> None:
        """Give waiting groups to actors with places for them, open missing actors, and end those without work."""
        self._yield_to_others()
        for rollout in self._rollouts:
            while rollout.waiting and (actor := self._least_loaded(len(rollout.waiting[0]))) is not None:
                self._give(actor, rollout, rollout.waiting.popleft())
        wanted = math.ceil((self._waiting + sum(actor.load for actor in self._actors)) / self._places)
        missing = min(self._count, wanted) - len(self._actors)
        for _ in range(missing if self._waiting else 0):
            self._open()
        for actor in self._actors:
            if actor.request is not None and actor.takes_more and not actor.load and not self._waiting:
                self._end(actor)
        self._changed.set()

    def _least_loaded(self, samples: int) -> LiveActor | None:
        """Return the actor with the fewest samples in its batch that has places for so many more; None if none has."""
        able = [
            actor
            for actor in self._actors
            if actor.request is not None
            and actor.started is not None
            and actor.takes_more
            and not actor.waiting
            and (actor.busy + samples <= self._places or not actor.busy)
        ]
        return min(able, key=lambda actor: actor.busy, default=None)

    def _yield_to_others(self) -> None:
        """Let no more samples join actors that are too many, or whose instances others wait for."""
        opening = sum(actor.request is None for actor in self._actors)
        wanted = max(0, self._count - max(0, self._queue.waiting - opening))
        able = sorted((actor for actor in self._actors if actor.takes_more), key=lambda actor: -actor.load)
        for actor in able[wanted:]:
            if actor.request is not None:
                self._end(actor)

    def _end(self, actor: LiveActor) -> None:
        actor.takes_more = False
        assert actor.request is not None
        actor.request.end()

    def _give(self, actor: LiveActor, rollout: LiveRollout, samples: list[SampleTask]) -> None:
        """Add samples to an actor's batch."""
        assert actor.request is not None
        assert actor.weights is not None
        if self._weights.newest() != actor.weights:
            self._renew(actor)
        for sink, share in actor.shares.items():
            if share.rollout is rollout:
                actor.request.send(rollout.more(sink, samples))
                break
        else:
            sink, request = rollout.open_share(actor.name, actor.weights, samples)
            share = actor.shares[sink] = Share(rollout)
            actor.request.send(Join(request=request))
        share.samples |= {key_of(sample): sample for sample in samples}
        actor.sent += len(samples)

    def _open(self) -> None:
        actor = LiveActor(f"actor-{next(self._numbers):04d}")
        self._actors[actor] = asyncio.create_task(self._serve(actor))

    def _shares_of(self, rollout: LiveRollout) -> Iterator[tuple[LiveActor, str]]:
        for actor in self._actors:
            for sink, share in actor.shares.items():
                if share.rollout is rollout:
                    yield actor, sink

    # --- an actor ---

    async def _serve(self, actor: LiveActor) -> None:
        """Have an instance, and follow its stream to the end."""
        error: InstanceLostError | TaskFailedError | None = None
        try:
            step = next((rollout.settings.step for rollout in self._rollouts if rollout.waiting), 0)
            preload = self._weights.preload(self._weights.newest())
            async with self._queue.part(step, self._count, preload, left=1) as part:
                await part.turn()
                if (request := self._first_request(actor)) is None:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(LONGEST_SECONDS), aclosing(self._platform.run(request)) as events:
                        async for event in events:
                            self._take(actor, event)
                        actor.is_drained = actor.takes_more and not actor.has_finished
                if actor.is_drained:
                    error = InstanceLostError("the instance was drained before it finished a sample")
        except (InstanceLostError, TaskFailedError) as failure:
            error = failure
        except Exception as failure:
            for rollout in self._rollouts:
                rollout.fail(failure)
        finally:
            del self._actors[actor]
            self._measure(actor)
            for share in actor.shares.values():
                self._lost(share, error)
        self._deal()

    def _first_request(self, actor: LiveActor) -> LiveRequest | None:
        """Return the request that opens an actor, with the group that begins next; None if none waits."""
        rollout = next((rollout for rollout in self._rollouts if rollout.waiting), None)
        if rollout is None:
            return None
        samples, weights = rollout.waiting.popleft(), self._weights.newest()
        sink, request = rollout.open_share(actor.name, weights, samples)
        live = LiveBatch(sequences=self._places, prompt_tokens=self._prompt_tokens)
        actor.request = LiveRequest.of(request.model_copy(update={"live": live}))
        actor.shares[sink] = Share(rollout, {key_of(sample): sample for sample in samples})
        actor.sent = len(samples)
        self._is_told(actor, weights, request.next_weights)
        return actor.request

    def _lost(self, share: Share, error: InstanceLostError | TaskFailedError | None) -> None:
        """Let the samples of a share that has ended wait again."""
        rollout = share.rollout
        rollout.give_back(list(share.samples.values()))
        if error is None or not share.samples:
            return
        rollout.failures += 1
        rollout.outcome.lost += 1
        try:
            what = f"generation of step {rollout.settings.step}"
            check_retry(error, rollout.failures, rollout.settings.retries, what)
        except Exception as final:
            rollout.fail(final)

    # --- events ---

    def _take(self, actor: LiveActor, event: Event) -> None:
        sink = getattr(event, "of", None)
        if sink is None:
            self._take_report(actor, event)
        elif (share := actor.shares.get(sink)) is not None:
            if isinstance(event, Failed):
                del actor.shares[sink]
                self._lost(share, TaskFailedError(event))
            elif not isinstance(event, Done):
                finished = share.rollout.take(sink, event)
                for key in finished:
                    share.samples.pop(key, None)
                actor.has_finished = actor.has_finished or bool(finished)
        self._look(actor)
        self._deal()

    def _take_report(self, actor: LiveActor, event: Event) -> None:
        """Take in what an actor says of its whole batch."""
        for share in list(actor.shares.values())[:1]:
            share.rollout.settings.on_event(event)
        if isinstance(event, Started):
            actor.started = event
        elif isinstance(event, Progress):
            actor.waiting, actor.prefetched = event.waiting, event.prefetched_version
            actor.reported, actor.received = event.running + event.waiting, event.received or 0
            self._count_passes(actor, event.decoding)
            if event.room is not None:
                self._measured.has_room(event.room)
            if event.version is not None and event.version != actor.version:
                actor.version = event.version
                if actor.started is not None:
                    self._weights.on_use(actor.started, event.version, event.weights_bytes)
                if actor.told_at is not None:
                    self._measured.switch_pauses.append(time.monotonic() - actor.told_at)
                    actor.told_at = None
            if event.lengths:
                self._hear(actor, event)
        elif isinstance(event, Done):
            self._measured.done(event)
            self._count_passes(actor, DecodeCounts.model_validate(event.result.get("decoding", {})))

    def _count_passes(self, actor: LiveActor, counts: DecodeCounts) -> None:
        self._measured.decoding.update(_difference(actor.decoding, counts))
        actor.decoding = counts

    def _hear(self, actor: LiveActor, event: Progress) -> None:
        lengths = {(prompt, index): tokens for prompt, index, tokens in event.lengths}
        heard = actor.heard
        if heard is not None:
            heard.now(lengths)
            if heard.last - heard.first < WINDOW_SECONDS:
                return
            self._measure(actor)
        actor.heard, actor.heard_counts = Heard(lengths), event.decoding
        actor.heard.now(lengths)

    def _measure(self, actor: LiveActor) -> None:
        """Learn an instance's speed from the reports since the last measurement."""
        heard, actor.heard = actor.heard, None
        if heard is None:
            return
        heard.decoding = DecodeCounts.model_validate(_difference(actor.heard_counts, actor.decoding))
        if stretch := heard.stretch():
            self._measured.stretches.append(stretch)

    def _report(self, outcome: GenerationOutcome) -> None:
        """Add to an outcome what was measured since the last one was."""
        found, self._measured = self._measured, GenerationOutcome(sinks=[])
        outcome.switches += found.switches
        outcome.stretches += found.stretches
        outcome.switch_pauses += found.switch_pauses
        outcome.weights_seconds = max(outcome.weights_seconds, found.weights_seconds)
        outcome.weights_fetched.update(found.weights_fetched)
        outcome.decoding.update(found.decoding)
        if found.room is not None:
            outcome.has_room(found.room)

    # --- weights ---

    def _look(self, actor: LiveActor) -> None:
        """Let an actor go on with newer weights, if there are any and it need not wait for its instance to fetch
        them."""
        newest = self._weights.newest()
        if actor.request is None or actor.weights in (None, newest) or actor.told_at is not None or not actor.load:
            return
        if actor.is_ready_for(newest):
            self._renew(actor)

    def _renew(self, actor: LiveActor) -> None:
        """Tell an actor to go on with the newest weights."""
        newest = self._weights.newest()
        upcoming = self._weights.upcoming(newest)
        assert actor.request is not None
        actor.request.send(NewWeights(present=self._weights.source(newest), next_weights=upcoming))
        self._is_told(actor, newest, upcoming)
        actor.told_at = time.monotonic()
        self._measured.switches += 1
        self._measure(actor)

    def _is_told(self, actor: LiveActor, weights: WeightsReference, upcoming: list[NextWeights]) -> None:
        actor.weights, actor.prefetched = weights, None
        actor.announced = max((each.weights.version for each in upcoming), default=weights.version)


def _difference(before: DecodeCounts, after: DecodeCounts) -> dict[str, float]:
    return {name: max(0, count - getattr(before, name)) for name, count in after.model_dump().items()}
