"""The measurements of live actors, until a rollout takes them into its outcome."""

import time

from rlhfless_functions.api import DecodeCounts, Done, Progress, WeightsFetched
from rlhfless_operator.planner.moves.migration import Key
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.heard import Heard
from rlhfless_operator.training.actors.live_actor import LiveActor

WINDOW_SECONDS = 5.0
"""Least seconds of generation from which the instances' speed is learnt."""


class LiveMeasurements:
    """Measurements of passes, speed, room and weights in the actors' reports since the last `report`."""

    def __init__(self) -> None:
        self._found = GenerationOutcome(sinks=[])

    def reported(self, actor: LiveActor, event: Progress) -> None:
        """Take in a report of an actor's batch."""
        self._count_passes(actor, event.decoding)
        self._count_fetches(actor, event.weights_fetched)
        if event.room is not None:
            self._found.has_room(event.room)
        if event.lengths:
            self._hear(actor, event)

    def ended(self, actor: LiveActor, event: Done) -> None:
        """Take in the end of an actor's request."""
        self._found.done(event)
        # Its reports have said most of it.
        self._found.weights_fetched.subtract(actor.fetched.model_dump())
        self._count_passes(actor, DecodeCounts.model_validate(event.result.get("decoding", {})))

    def switches(self, actor: LiveActor) -> None:
        """Note that an actor is told to go on with other weights."""
        actor.told_at = time.monotonic()
        self._found.switches += 1
        self.measure(actor)

    def switched(self, actor: LiveActor) -> None:
        """Note that an actor decodes with other weights than before."""
        if actor.told_at is not None:
            self._found.switch_pauses.append(time.monotonic() - actor.told_at)
            actor.told_at = None

    def measure(self, actor: LiveActor) -> None:
        """Learn an instance's speed from the reports since the last measurement."""
        heard, actor.heard = actor.heard, None
        if heard is None:
            return
        heard.decoding = DecodeCounts.model_validate(_difference(actor.heard_counts, actor.decoding))
        if stretch := heard.stretch():
            self._found.stretches.append(stretch)

    def report(self, outcome: GenerationOutcome) -> None:
        """Add to an outcome what was measured since the last one was."""
        found, self._found = self._found, GenerationOutcome(sinks=[])
        outcome.switches += found.switches
        outcome.stretches += found.stretches
        outcome.switch_pauses += found.switch_pauses
        outcome.weights_seconds = max(outcome.weights_seconds, found.weights_seconds)
        outcome.weights_fetched.update(found.weights_fetched)
        outcome.decoding.update(found.decoding)
        if found.room is not None:
            outcome.has_room(found.room)

    def _count_passes(self, actor: LiveActor, counts: DecodeCounts) -> None:
        self._found.decoding.update(_difference(actor.decoding, counts))
        actor.decoding = counts

    def _count_fetches(self, actor: LiveActor, counts: WeightsFetched) -> None:
        self._found.weights_fetched.update(_difference(actor.fetched, counts))
        actor.fetched = counts

    def _hear(self, actor: LiveActor, event: Progress) -> None:
        lengths = {(prompt, index): tokens for prompt, index, tokens in event.lengths}
        heard, held = actor.heard, frozenset[Key]()
        if heard is not None:
            heard.now(lengths)
            if heard.last - heard.first < WINDOW_SECONDS:
                return
            self.measure(actor)
            held = frozenset(lengths)
        # At first, and with other weights, the contexts of all samples are computed.
        actor.heard, actor.heard_counts = Heard(lengths, held), event.decoding
        actor.heard.now(lengths)


def _difference(before: DecodeCounts | WeightsFetched, after: DecodeCounts | WeightsFetched) -> dict[str, int]:
    return {name: max(0, count - getattr(before, name)) for name, count in after.model_dump().items()}
