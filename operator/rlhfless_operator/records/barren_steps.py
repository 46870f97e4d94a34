"""Steps that taught nothing: what the records say of them, and what a person should be told.

Pure functions of the records: a driver that takes a job over, and a report that is made later, say the same.
"""

from collections.abc import Sequence

from rlhfless_operator.records.record import StepRecord

TOLERATED = 2
"""So many in a row are nothing to speak of."""


def taught_nothing(record: StepRecord) -> bool:
    """Whether no sample of a step moved the policy to or from what it had done; False where the step does not say."""
    return record.step > 0 and record.metrics.get("batch/teaching_groups") == 0


def barren_stretches(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Longest runs of steps in a row that taught nothing, of those that are longer than is tolerated."""
    stretches: list[list[StepRecord]] = [[]]
    for record in records:
        if taught_nothing(record):
            stretches[-1].append(record)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if len(stretch) > TOLERATED]


def describe(stretch: Sequence[StepRecord]) -> str:
    """Why some steps in a row taught nothing, and what to do about it."""
    last = stretch[-1]
    which = f"steps {stretch[0].step} to {last.step} taught nothing"
    if last.metric("batch/masked_samples") == last.metric("batch/samples"):
        return (
            f"{which}: every sample was left out of the loss, as unscorable or as truncated (algorithm.maskTruncated);"
            " look at reward/unscorable and truncated in metrics.jsonl, and mend the rewards or raise"
            " sampling.maxResponseTokens"
        )
    reward = last.metrics.get("reward")
    mean = "" if reward is None else f", {reward:.3g} in the mean"
    return (
        f"{which}: the samples of every group got the same reward{mean}; check the reward, and if it is right, add"
        " easier or harder prompts, sample more of each (batch.samplesPerPrompt), or raise sampling.temperature"
    )


def warning_now(records: Sequence[StepRecord]) -> str | None:
    """What is wrong after the last step; None if nothing is."""
    stretches = barren_stretches(records)
    return describe(stretches[-1]) if stretches and stretches[-1][-1] is records[-1] else None


def is_due(records: Sequence[StepRecord]) -> bool:
    """Whether a person should be told now: when a stretch begins to count, and whenever it has doubled since."""
    if warning_now(records) is None:
        return False
    times, rest = divmod(len(barren_stretches(records)[-1]), TOLERATED + 1)
    return rest == 0 and times & (times - 1) == 0
