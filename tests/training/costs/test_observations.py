"""The speed of instances, as it is learnt from what their actors did."""

import pytest

from rlhfless_functions.api import EngineRoom
from rlhfless_operator.planner.latency.calibration import Calibration
from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.training.actors.generated import GenerationOutcome, Stretch
from rlhfless_operator.training.costs.observations import observe


def test_steps_in_which_samples_waited_are_counted() -> None:
    """As if all had run at once, the instance would seem four times as slow as it is."""
    calibrations = [Calibration(LinearLatency(0.01, 1e-4, 1e-6, 1e-4)) for _ in range(2)]
    tokens = {(prompt, 0): 100 for prompt in range(12)}
    for calibration, batch, seconds in zip(calibrations, (12, 3), (1.0, 4.0), strict=True):
        for _ in range(20):
            outcome = GenerationOutcome(sinks=[], lengths=tokens, tokens=1200)
            outcome.has_room(EngineRoom(sequences=batch, kv_tokens=10**6))
            outcome.stretches.append(Stretch(dict.fromkeys(tokens, 0), tokens, seconds))
            observe(calibration, outcome, [5] * 12)
    whole, waited = (each.latency.decode_seconds(3, 50) for each in calibrations)
    assert waited == pytest.approx(whole, rel=0.2)


def test_prompts_that_other_actors_computed_do_not_make_an_instance_seem_fast() -> None:
    """Nor does it seem slow for having waited for them."""
    calibration = Calibration(LinearLatency(step_seconds=0.01, prefill_token_seconds=0.0005))
    for number in range(40):
        lengths = {(prompt, 0): 100 for prompt in range(2 + number % 5)}
        fetched, waited = 1000.0 * (number % 3), 0.5 * (number % 4)
        computed = 1000 * len(lengths) - fetched
        outcome = GenerationOutcome(sinks=[], lengths=lengths, tokens=100 * len(lengths))
        # A second of decoding, and a millisecond for each token of a prompt.
        made = Stretch(
            dict.fromkeys(lengths, 0),
            lengths,
            1.0 + 0.001 * computed + waited,
            fetched_tokens=fetched,
            waited_seconds=waited,
        )
        outcome.stretches.append(made)
        observe(calibration, outcome, [1000] * 12)
    assert calibration.latency.prefill_token_seconds == pytest.approx(0.001, rel=0.1)


def test_what_a_live_batch_holds_is_not_taken_for_computed() -> None:
    """The reports of a live batch counted all of its contexts as computed, every five seconds. Prefill seemed free."""
    calibration = Calibration(LinearLatency(step_seconds=0.01, prefill_token_seconds=0.0005))
    begun: dict[tuple[int, int], int] = {}
    for window in range(60):
        # Each window of 100 passes has a sample more. Every tenth begins with new weights.
        held = frozenset[tuple[int, int]]() if window % 10 == 0 else frozenset(begun)
        joined = {**begun, (window % 12, window): 0}
        tokens = {key: count + 100 for key, count in joined.items()}
        computed = 1000 * len({key[0] for key in tokens.keys() - held} - {key[0] for key in held})
        computed += sum(count for key, count in joined.items() if key not in held)
        outcome = GenerationOutcome(sinks=[], lengths={}, tokens=100 * len(tokens))
        outcome.stretches.append(Stretch(joined, tokens, 1.0 + 0.001 * computed, held=held))
        observe(calibration, outcome, [1000] * 12)
        begun = dict(list(tokens.items())[-8:])
    assert calibration.latency.prefill_token_seconds == pytest.approx(0.001, rel=0.1)
