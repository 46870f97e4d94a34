"""The report's charts of what was foreseen."""

from rlhfless_operator.planner.lengths import PredictionReport
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.report.planning import charts
from rlhfless_operator.report.run import Run


def run_of(*metrics: dict[str, float]) -> Run:
    records = [StepRecord(step=step, metrics=each) for step, each in enumerate(metrics, start=1)]
    return Run(job_text="", job={}, status={}, summary={}, records=records, spans=[], samples=[])


def test_each_steps_prediction_and_plan_are_shown() -> None:
    html = charts(
        run_of(
            {"prediction/relative_error": 0.5, "planning/expected_seconds": 9.0, "generation/seconds": 10.0},
            {
                "prediction/relative_error": 0.2,
                "prediction/rank_correlation": 0.91,
                "planning/expected_seconds": 9.0,
                "generation/seconds": 9.5,
                "planning/lower_bound_share": 0.8,
            },
        )
    )
    for title in ("rank correlation", "Predicted lengths: error", "Seconds of generation", "Share of the lower bound"):
        assert title in html


def test_the_staleness_of_an_asynchronous_run_is_shown() -> None:
    html = charts(run_of({"generation/staleness": 0.0}, {"generation/staleness": 1.0}))
    assert "Staleness" in html and "Share of the lower bound" not in html


def test_a_run_without_plans_has_no_such_section() -> None:
    assert charts(run_of({"reward": 1.0})) == ""


def test_what_a_prediction_does_not_define_is_no_metric() -> None:
    report = PredictionReport(4, 1, rank_correlation=None, prompt_rank_correlation=0.5, relative_error=0.3, bias=-0.1)
    assert report.metrics() == {
        "prediction/seen_share": 0.25,
        "prediction/prompt_rank_correlation": 0.5,
        "prediction/relative_error": 0.3,
        "prediction/bias": -0.1,
    }
