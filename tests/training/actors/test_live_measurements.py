"""What live actors' reports say of weights, decoding and speed, until a rollout takes it."""

import time

import pytest

from rlhfless_functions.api import Done, Progress, WeightsFetched
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.live_actor import LiveActor
from rlhfless_operator.training.actors.live_measurements import WINDOW_SECONDS, LiveMeasurements


def test_fetched_weights_count_when_they_are_reported_and_once() -> None:
    """A request may outlive the job's last rollout."""
    measured, actor = LiveMeasurements(), LiveActor("actor")

    def reported() -> dict[str, int]:
        outcome = GenerationOutcome(sinks=[])
        measured.report(outcome)
        return {name: count for name, count in outcome.weights_fetched.items() if count}

    def report(**fetched: int) -> None:
        counts = WeightsFetched(**fetched)
        measured.reported(actor, Progress(finished=0, running=1, waiting=0, tokens=0, weights_fetched=counts))

    report(bytes=100)
    report(bytes=100)
    assert reported() == {"bytes": 100}
    report(bytes=150, prefetched=1)
    assert reported() == {"bytes": 50, "prefetched": 1}
    counts = WeightsFetched(bytes=170, prefetched=2)
    measured.ended(actor, Done(result={"weights_fetched": counts.model_dump()}))
    assert reported() == {"bytes": 20, "prefetched": 1}


def test_a_stretch_holds_what_was_decoded_before_it_unless_weights_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, actor, now = LiveMeasurements(), LiveActor("actor"), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def report(**lengths: int) -> None:
        now[0] += WINDOW_SECONDS / 2
        told = [(int(name[1:]), 0, tokens) for name, tokens in lengths.items()]
        measured.reported(actor, Progress(finished=0, running=len(told), waiting=0, tokens=0, lengths=told))

    report(p0=1)
    report(p0=5)
    report(p0=9)
    report(p0=13, p1=2)
    report(p0=17, p1=6)
    measured.switches(actor)
    report(p0=21, p1=10)
    report(p0=25, p1=14)
    report(p0=29, p1=18)
    measured.report(outcome := GenerationOutcome(sinks=[]))
    assert [stretch.held for stretch in outcome.stretches] == [frozenset(), {(0, 0)}, frozenset()]
    begun = [{(0, 0): 1}, {(0, 0): 9, (1, 0): 0}, {(0, 0): 21, (1, 0): 10}]
    assert [stretch.begun for stretch in outcome.stretches] == begun
