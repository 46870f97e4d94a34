"""Steps whose engine and learner disagree: find them in the records, and tell people.

Both compute log-probabilities of the same tokens with the same weights. A step's record has the mean of
exp|difference|, and how much of it the job's number formats explain. With older weights the two differ anyway, so a
step with stale tokens is not judged.

These are pure functions of the records, as those of `barren_steps`.
"""

from collections.abc import Mapping, Sequence

from rlhfless_operator.records.record import StepRecord

FOUND = "mismatch/mean_exp_abs"
EXPLAINED = "mismatch/explained"
_STALE = ("generation/staleness", "generation/token_staleness")


def mismatch_of(metrics: Mapping[str, float]) -> float | None:
    """Return the mean exp|difference| of a step's log-probabilities; None if nothing was compared at equal weights."""
    return None if any(metrics.get(name, 0.0) > 0 for name in _STALE) else metrics.get(FOUND)


def disagrees(record: StepRecord) -> bool:
    """Return whether a step's engine and learner differ by more than its formats explain; False if it does not say."""
    found, explained = mismatch_of(record.metrics), record.metrics.get(EXPLAINED)
    return found is not None and explained is not None and found > explained


def last_stretch(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the last steps in a row that disagree; empty if the very last one does not."""
    stretch: list[StepRecord] = []
    for record in reversed(records):
        if not disagrees(record):
            break
        stretch.insert(0, record)
    return stretch


def warning_now(records: Sequence[StepRecord]) -> str | None:
    """Return the warning about the last steps; None if there is nothing to warn of."""
    stretch = last_stretch(records)
    if not stretch:
        return None
    first, last = stretch[0].step, stretch[-1]
    steps = f"step {first}" if first == last.step else f"steps {first} to {last.step}"
    return (
        f"{steps}: {describe(last.metric(FOUND), last.metric(EXPLAINED))}; try another generation.engine, or"
        " model.dtype: float32 without quantization, to see whether it is a fault"
    )


def is_due(records: Sequence[StepRecord]) -> bool:
    """Return whether to warn now: when steps begin to disagree, and whenever their number has doubled since."""
    count = len(last_stretch(records))
    return count > 0 and count & (count - 1) == 0


def account(records: Sequence[StepRecord]) -> str | None:
    """Return an account of all steps that disagree, for a report; None if there are none."""
    found = [record for record in records if disagrees(record)]
    if not found:
        return None
    worst = max(found, key=lambda record: record.metric(FOUND))
    which = f"in {len(found)} of {len(records)} steps, most in step {worst.step}"
    return f"{which}: {describe(worst.metric(FOUND), worst.metric(EXPLAINED))}"


def describe(found: float, explained: float) -> str:
    """Say how far the two are apart."""
    return (
        "engine and learner give the sampled tokens other log-probabilities with the same weights: the mean of"
        f" exp|difference| ({FOUND}) is {found:.4g}, and the job's number formats explain {explained:g}"
    )
