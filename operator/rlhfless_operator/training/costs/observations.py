"""The speed of instances, as plans learn it from what their requests did."""

from collections.abc import Sequence
from statistics import fmean

from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.calibration import Calibration, Observation
from rlhfless_operator.training.actors.generated import GenerationOutcome, Stretch
from rlhfless_operator.training.actors.prepared import PreparationOutcome


def observe(calibration: Calibration, outcome: GenerationOutcome, prompt_tokens: Sequence[int]) -> None:
    """Learn the instances' speed from what their actors did.

    Args:
        prompt_tokens: tokens of every prompt of the dataset, by row.
    """
    batch = outcome.room.sequences if outcome.room is not None else None
    seen = [_observation(stretch, prompt_tokens, batch) for stretch in outcome.stretches]
    calibration.observe(*(each for each in seen if each is not None))


def note_preparation(history: History, outcome: PreparationOutcome, tokens: int) -> None:
    """Learn the seconds of preparing a token, and those in which an instance loads the models.

    Args:
        tokens: of all prepared samples, their prompts included.
    """
    if outcome.seconds and tokens:
        history.add("preparation/token", outcome.seconds / tokens)
    if outcome.loads:
        history.add("preparation/load", fmean(outcome.loads))


def _observation(stretch: Stretch, prompt_tokens: Sequence[int], batch: int | None) -> Observation | None:
    """Return what a request did, in the terms of the latency model; None if it generated nothing.

    An engine that counts its passes says how many there were, and how many drafted rows. Of others it is taken that
    every pass gave each sequence a token. Tokens whose keys and values were kept from the request before count as
    nothing.
    """
    made = {key: max(0, tokens - stretch.begun[key]) for key, tokens in stretch.tokens.items()}
    total = sum(made.values())
    if total == 0:
        return None
    computed = stretch.tokens.keys() - set(stretch.held)
    prompts = {prompt for prompt, _ in computed} - {prompt for prompt, _ in stretch.held}
    prompt_total = sum(prompt_tokens[prompt] for prompt in prompts)
    contexts = sum(count * (prompt_tokens[key[0]] + stretch.begun[key] + count / 2) for key, count in made.items())
    counts = stretch.decoding
    # Where some had to wait there were more steps than the longest response has tokens.
    steps, sequence_steps = max(max(made.values()), total / batch if batch else 0), float(total)
    if counts.passes and counts.tokens:
        steps, sequence_steps = counts.passes, total * counts.sequence_passes / counts.tokens
    return Observation(
        steps=steps,
        sequence_steps=sequence_steps,
        context_tokens=contexts * sequence_steps / total,
        # What had been generated before is computed again like a prompt.
        prefill_tokens=max(
            0.0,
            max(0.0, prompt_total - stretch.fetched_tokens)
            + sum(stretch.begun[key] for key in computed)
            - counts.kept_tokens,
        ),
        # It may have begun to wait before it was first heard of.
        seconds=max(stretch.seconds - stretch.waited_seconds, 0.1 * stretch.seconds),
        drafted_rows=counts.drafted,
    )
