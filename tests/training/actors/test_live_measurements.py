"""What live actors' reports say of weights, decoding and speed, until a rollout takes it."""

from rlhfless_functions.api import Done, Progress, WeightsFetched
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.live_actor import LiveActor
from rlhfless_operator.training.actors.live_measurements import LiveMeasurements


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
