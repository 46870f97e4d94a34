"""Steps whose engine and learner disagree: which they are, and when a person is told."""

from rlhfless_operator.records.mismatch import account, disagrees, is_due, mismatch_of, warning_now
from rlhfless_operator.records.record import StepRecord


def record(step: int, found: float, **metrics: float) -> StepRecord:
    return StepRecord(step=step, metrics={"mismatch/mean_exp_abs": found, "mismatch/explained": 1.05, **metrics})


def records(*found: float) -> list[StepRecord]:
    return [record(step, each) for step, each in enumerate(found, start=1)]


def test_a_step_is_judged_by_what_its_formats_explain() -> None:
    assert disagrees(record(1, 1.06))
    assert not disagrees(record(1, 1.05))
    assert not disagrees(StepRecord(step=1, metrics={"mismatch/mean_exp_abs": 6.0}))
    assert not disagrees(StepRecord(step=0))


def test_stale_tokens_differ_anyway_and_are_not_judged() -> None:
    for staleness in ("generation/staleness", "generation/token_staleness"):
        assert not disagrees(record(2, 6.0, **{staleness: 0.5}))
        assert mismatch_of({"mismatch/mean_exp_abs": 6.0, staleness: 0.5}) is None
        assert disagrees(record(1, 6.0, **{staleness: 0.0}))


def test_the_warning_names_the_steps_the_figures_and_a_remedy() -> None:
    assert warning_now(records(1.0, 6.0, 1.0)) is None
    assert warning_now([]) is None
    assert warning_now(records(1.0, 6.3456)) == (
        "step 2: engine and learner give the sampled tokens other log-probabilities with the same weights: the mean of"
        " exp|difference| (mismatch/mean_exp_abs) is 6.346, and the job's number formats explain 1.05; try another"
        " generation.engine, or model.dtype: float32 without quantization, to see whether it is a fault"
    )
    assert str(warning_now(records(1.0, 6.0, 7.0))).startswith("steps 2 to 3: ")


def test_a_person_is_told_at_once_and_when_the_number_has_doubled() -> None:
    so_far = [1.0, *[6.0] * 8]
    assert [is_due(records(*so_far[:count])) for count in range(1, 10)] == [
        False, True, True, False, True, False, False, False, True,
    ]  # fmt: skip


def test_a_report_says_how_many_steps_and_which_is_the_worst() -> None:
    assert account(records(1.0, 1.0)) is None
    assert str(account(records(1.0, 2.0, 3.0, 1.0))).startswith("in 2 of 4 steps, most in step 3: engine and learner")
