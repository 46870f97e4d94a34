"""The live actors of an asynchronous job: their batches go on from rollout to rollout.

Each actor is one request whose body stays open (`api/live.py`). Groups wait here, those of the earliest rollout first,
and go to actors one by one. At most one group waits in an instance for free places of its batch. So a batch is full as
long as groups wait, and a group is assigned late. An actor without samples ends once no groups wait and no rollout is
coming.

With `newWeights: switch` all responses have the same weights at any time. When newer ones are written down, each actor
swaps them in between two passes. With `finish` a response keeps the weights that it began with, and a batch has
responses of one version. `planner/moves/live_batches.py` says which batch a group joins, and which one is emptied so
that it can take other weights.

A lost actor's samples wait again, before all others, and are continued from what it had published. So do samples that
are moved.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress

from rlhfless_functions.api import (
    Done,
    Event,
    Failed,
    Join,
    Leave,
    LiveBatch,
    NewWeights,
    Progress,
    SampleTask,
    Started,
    WeightsReference,
)
from rlhfless_operator.planner.moves.live_batches import Empty, Give, WaitingGroup, deal
from rlhfless_operator.planner.moves.live_sizes import Batches
from rlhfless_operator.platforms.base import InstanceLostError, Platform, TaskFailedError
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.training.actors.heard import key_of
from rlhfless_operator.training.actors.live_actor import LiveActor, Share, Weights, later
from rlhfless_operator.training.actors.live_measurements import LiveMeasurements
from rlhfless_operator.training.actors.live_rollout import LiveRollout
from rlhfless_operator.training.instances.instance_queue import InstanceQueue
from rlhfless_operator.training.requests.tasks import check_retry

LONGEST_SECONDS = 300.0
"""Seconds after which an actor is cut, and another one goes on with its samples. Clusters limit the length of a
request, by default to twice as long (`knative.requestTimeout`). If samples act in environments, none join the actor any
more instead: elsewhere their episodes would have to be played again."""


class LiveActors:
    """The live actors of a job.

    Args:
        platform: runs the instances.
        queue: gives each actor an instance.
        weights: the weights to decode with.
        prompt_tokens: tokens of the longest prompt of the dataset.
        is_last: returns whether no rollout follows those that have begun. Then the last samples are gathered.
        act: whether samples act in environments.
    """

    def __init__(
        self,
        platform: Platform,
        queue: InstanceQueue,
        weights: Weights,
        prompt_tokens: int,
        is_last: Callable[[], bool] = lambda: False,
        *,
        act: bool = False,
    ) -> None:
        self._platform = platform
        self._queue = queue
        self._weights = weights
        self._prompt_tokens = prompt_tokens
        self._is_last = is_last
        self._act = act
        self._batches = Batches(1, 1, 1)
        self._group = 1
        """Samples of the largest group."""
        self._rollouts: list[LiveRollout] = []
        self._newest = 0
        """Number of the newest rollout that has begun."""
        self._coming: set[int] = set()
        """Rollouts that begin once there is room. Actors without samples wait for them."""
        self._actors: dict[LiveActor, asyncio.Task[None]] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._measured = LiveMeasurements()

    # --- rollouts ---

    @asynccontextmanager
    async def generating(self, rollout: LiveRollout, batches: Batches) -> AsyncIterator[None]:
        """Generate a rollout until this is left. Its outcome then has what was measured meanwhile.

        Args:
            batches: the actors from now on.
        """
        self._batches = batches
        self._group = max(self._group, *map(len, rollout.waiting))
        self._rollouts.append(rollout)
        self._newest = max(self._newest, rollout.settings.step)
        self._coming.discard(rollout.settings.step)
        self._rollouts.sort(key=lambda each: each.settings.step)
        self.assign()
        try:
            yield
        finally:
            self._rollouts.remove(rollout)
            for actor, sink in list(self._shares_of(rollout)):
                del actor.shares[sink]
                if actor.request is not None:
                    actor.request.send(Leave(sink=sink))
            self.assign()
            self._measured.report(rollout.outcome)

    @property
    def running(self) -> int:
        """Number of actors."""
        return len(self._actors)

    async def room(self, step: int, weights: Callable[[], WeightsReference], *, beside: int) -> None:
        """Wait until rollout `beside` has begun, and a group of rollout `step` would begin at once.

        From now on actors without samples wait for it, until it begins or `release` is called.

        Args:
            weights: returns the weights that would sample it.
        """
        self._coming.add(step)
        while self._newest < beside or self._waiting or not self._has_place(weights()):
            self._changed.clear()
            await self._changed.wait()

    def release(self, step: int) -> None:
        """Let no actor wait for a rollout that does not begin or is complete."""
        self._coming.discard(step)
        self.assign()

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
    def _room(self) -> int:
        """Samples that a batch may have now."""
        there = sum(actor.takes_more for actor in self._actors)
        return self._batches.room(self._unfinished, there, self._group, may_open=self._may_open)

    @property
    def _may_open(self) -> bool:
        """Whether another actor may open. One that is being opened counts."""
        return len(self._actors) < self._batches.actors or any(actor.started is None for actor in self._actors)

    @property
    def _unfinished(self) -> Counter[int]:
        """Number of unfinished samples of each version that are not away."""
        samples: Counter[int] = Counter()
        for rollout in self._rollouts:
            samples[rollout.weights.version] += sum(map(len, rollout.waiting))
        for actor in self._actors:
            samples += actor.present
        return samples

    @property
    def _next(self) -> LiveRollout | None:
        """The rollout whose group begins next; None if none waits."""
        return next((rollout for rollout in self._rollouts if rollout.waiting), None)

    def _has_place(self, weights: WeightsReference) -> bool:
        """Return whether a group with these weights would begin at once."""
        room, group = self._room, WaitingGroup(weights.version, 1)
        batches = [actor.batch(self._batches, room) for actor in self._able]
        return len(self._actors) < self._batches.actors or any(
            isinstance(command, Give) for command in deal(batches, [group], may_open=False, gathers=False)
        )

    @property
    def _able(self) -> list[LiveActor]:
        """Actors that samples may join."""
        return [actor for actor in self._actors if actor.is_able]

    def assign(self) -> None:
        """Give waiting groups to actors with places for them, open missing actors, and end those without work."""
        self._yield_to_others()
        able, room = self._able, self._room
        groups = [(rollout, group) for rollout in self._rollouts for group in rollout.waiting]
        commands = deal(
            [actor.batch(self._batches, room) for actor in able],
            [WaitingGroup(rollout.weights.version, len(group)) for rollout, group in groups],
            may_open=self._may_open,
            gathers=not self._coming and self._is_last(),
        )
        given: dict[tuple[LiveActor, LiveRollout], list[SampleTask]] = {}
        for command in commands:
            actor = able[command.batch]
            if isinstance(command, Empty):
                self._empty(actor)
                continue
            rollout, group = groups[command.group]
            rollout.waiting.remove(group)
            given.setdefault((actor, rollout), []).extend(group)
        for (actor, rollout), samples in given.items():
            self._give(actor, rollout, samples)
        if self._waiting:
            # Actors that are being opened take what waits.
            left = 0 if any(actor.started is None for actor in self._actors) else self._waiting
            for _ in range(self._batches.missing(self._unfinished, len(self._actors), left=left)):
                self._open()
        for actor in able:
            if actor.takes_more and not actor.staying and not self._waiting and not self._coming:
                self._end(actor)
        self._changed.set()

    def _yield_to_others(self) -> None:
        """Let no more samples join actors that are too many, or whose instances others wait for."""
        opening = sum(actor.request is None for actor in self._actors)
        wanted = max(0, self._batches.actors - max(0, self._queue.waiting - opening))
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
        if rollout.weights != actor.weights:
            self._renew(actor, rollout.weights)
        for sink, share in actor.shares.items():
            if share.rollout is rollout and not share.leaves:
                actor.request.send(rollout.more(sink, samples))
                break
        else:
            sink, request = rollout.open_share(actor.name, rollout.weights, samples)
            share = actor.shares[sink] = Share(rollout)
            actor.request.send(Join(request=request))
        share.samples |= {key_of(sample): sample for sample in samples}
        actor.sent += len(samples)

    def _empty(self, actor: LiveActor, weights: WeightsReference | None = None) -> None:
        """Take all samples out of an actor's batch that do not go on with these weights. They wait again once the
        instance has published what there is of them."""
        assert actor.request is not None
        for sink, share in actor.shares.items():
            if not share.leaves and (weights is None or share.rollout.weights != weights):
                share.leaves = True
                share.rollout.outcome.moved += len(share.samples)
                actor.request.send(Leave(sink=sink))

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
            if (rollout := self._next) is None:
                return
            preload = self._weights.preload(rollout.weights)
            async with self._queue.part(rollout.settings.step, self._batches.actors, preload, left=1) as part:
                await part.turn()
                if (request := self._first_request(actor)) is None:
                    return
                with suppress(TimeoutError), later(LONGEST_SECONDS, lambda: self._end(actor)):
                    limit = None if self._act else LONGEST_SECONDS
                    async with asyncio.timeout(limit), aclosing(self._platform.run(request)) as events:
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
            self._measured.measure(actor)
            for share in actor.shares.values():
                self._lost(share, error)
        self.assign()

    def _first_request(self, actor: LiveActor) -> LiveRequest | None:
        """Return the request that opens an actor, with the group that begins next; None if none waits."""
        if (rollout := self._next) is None:
            return None
        samples, weights = rollout.waiting.popleft(), rollout.weights
        sink, request = rollout.open_share(actor.name, weights, samples)
        live = LiveBatch(sequences=self._batches.sequences(self._group), prompt_tokens=self._prompt_tokens)
        upcoming = self._weights.upcoming(weights)
        actor.request = LiveRequest.of(request.model_copy(update={"live": live, "next_weights": upcoming}))
        actor.shares[sink] = Share(rollout, {key_of(sample): sample for sample in samples})
        actor.sent = len(samples)
        actor.is_told(weights, upcoming)
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
            elif isinstance(event, Done):
                if share.leaves:
                    del actor.shares[sink]
                    share.rollout.give_back(list(share.samples.values()), apart=True)
            else:
                finished = share.rollout.take(sink, event)
                for key in finished:
                    share.samples.pop(key, None)
                actor.has_finished = actor.has_finished or bool(finished)
        self._look(actor)
        self.assign()

    def _take_report(self, actor: LiveActor, event: Event) -> None:
        """Take in what an actor says of its whole batch."""
        for share in list(actor.shares.values())[:1]:
            share.rollout.settings.on_event(event)
        if isinstance(event, Started):
            actor.started = event
        elif isinstance(event, Progress):
            actor.reports(event)
            self._measured.reported(actor, event)
            if event.version is not None and event.version != actor.version:
                actor.version = event.version
                if actor.started is not None:
                    self._weights.on_use(actor.started, event.version, event.weights_bytes)
                self._measured.switched(actor)
        elif isinstance(event, Done):
            self._measured.ended(actor, event)

    # --- weights ---

    def _look(self, actor: LiveActor) -> None:
        """Let an actor go on with the weights that its samples now have, if it need not wait for its instance to fetch
        them."""
        staying = actor.staying
        if actor.request is None or actor.told_at is not None or not staying:
            return
        wanted = staying[0].rollout.weights
        if wanted != actor.weights and actor.is_ready_for(wanted):
            self._renew(actor, wanted)

    def _renew(self, actor: LiveActor, weights: WeightsReference) -> None:
        """Tell an actor to go on with other weights."""
        self._empty(actor, weights)
        upcoming = self._weights.upcoming(weights)
        assert actor.request is not None
        actor.request.send(NewWeights(present=self._weights.source(weights), next_weights=upcoming))
        actor.is_told(weights, upcoming)
        self._measured.switches(actor)
