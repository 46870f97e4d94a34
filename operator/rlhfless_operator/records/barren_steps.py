"""Steps without anything to learn from: find them in the records, and tell people.

These are pure functions of the records, so a driver that takes a job over and a later report give the same message.
"""

from collections.abc import Sequence

from rlhfless_operator.records.record import StepRecord

TOLERATED = 2
"""Most such steps in a row without a warning."""


def taught_nothing(record: StepRecord) -> bool:
    """Return whether a step had nothing to learn from; False if its record does not say."""
    return record.step > 0 and record.metrics.get("batch/teaching_groups") == 0


def barren_stretches(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Find the stretches of such steps in a row that are longer than tolerated."""
    stretches: list[list[StepRecord]] = [[]]
    for record in records:
        if taught_nothing(record):
            stretches[-1].append(record)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if len(stretch) > TOLERATED]


def describe(stretch: Sequence[StepRecord]) -> str:
    """Explain why such steps had nothing to learn from, and how to change that."""
    last = stretch[-1]
    which = f"steps {stretch[0].step} to {last.step} had nothing to learn from"
    if last.metric("batch/masked_samples") == last.metric("batch/samples"):
        return (
            f"{which}: every sample was excluded from the loss, as unscorable or truncated (algorithm.maskTruncated);"
            " look at reward/unscorable and truncated in metrics.jsonl, and correct the rewards or raise"
            " sampling.maxResponseTokens"
        )
    reward = last.metrics.get("reward")
    mean = "" if reward is None else f", {reward:.3g} on average"
    return (
        f"{which}: all samples of each group got the same reward{mean}; check the reward and, if it is right, add"
        " easier or harder prompts, raise batch.samplesPerPrompt, or raise sampling.temperature"
    )


def warning_now(records: Sequence[StepRecord]) -> str | None:
    """Return the warning about the last steps; None if there is nothing to warn of."""
    stretches = barren_stretches(records)
    return describe(stretches[-1]) if stretches and stretches[-1][-1] is records[-1] else None


def is_due(records: Sequence[StepRecord]) -> bool:
    """Return whether to warn now: when a stretch first exceeds the limit, and whenever it has doubled since."""
    if warning_now(records) is None:
        return False
    times, rest = divmod(len(barren_stretches(records)[-1]), TOLERATED + 1)
    return rest == 0 and times & (times - 1) == 0
