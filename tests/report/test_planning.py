"""The report's charts of what was foreseen."""

from dataclasses import replace
from typing import Any

from rlhfless_operator.planner.lengths import PredictionReport
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.report.planning import section
from rlhfless_operator.report.run import Run


def run_of(*metrics: dict[str, float], **status: Any) -> Run:
    records = [StepRecord(step=step, metrics=each) for step, each in enumerate(metrics, start=1)]
    return Run(job_text="", job={}, status=status, summary={}, records=records, spans=[], samples=[])


def test_each_steps_prediction_and_plan_are_shown() -> None:
    html = section(
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
    html = section(run_of({"generation/staleness": 0.0}, {"generation/staleness": 1.0}))
    assert "Staleness" in html and "Share of the lower bound" not in html


def test_how_many_instances_learn_and_why_is_told() -> None:
    learners = {"step": 5, "instances": 2, "reason": "1 takes 11 s for 1,000 tokens & more (λ 0.5)"}
    steps = [{"learning/instances": each, "learning/instances_chosen": 2.0} for each in (2.0, 1.0, 2.0)]
    html = section(run_of(*steps, learners=learners))
    assert "Learning instances" in html and "took the step" in html
    assert "From step 5 on 2 instances learn together: 1 takes 11 s for 1,000 tokens &amp; more (λ 0.5).</p>" in html
    alone = section(run_of(*steps, learners={**learners, "instances": 1}))
    assert "From step 5 on 1 instance learns: " in alone
    assert section(run_of({"learning/instances": 2.0})) == "", "there was no choice"


def test_how_many_instances_prepared_and_why_is_told() -> None:
    plan = {"preparers": 3, "preparers_reason": "preparation takes 40 instance-seconds a step & more"}
    run = run_of({"reward": 1.0})
    run.records[0] = run.records[0].model_copy(update={"plan": plan})
    assert (
        section(run)
        == "<p>In step 1, 3 instances prepared: preparation takes 40 instance-seconds a step &amp; more.</p>"
    )
    run.records[0] = run.records[0].model_copy(update={"plan": {**plan, "preparers_reason": ""}})
    assert section(run) == "", "there was no choice"


def test_why_instances_share_prefixes_or_do_not_is_told() -> None:
    reasons = ("no: a step has one actor", "yes: step 2 can save 3 of 8 instance-seconds & more")
    records = [StepRecord(step=step, plan={"prefixes": reason}) for step, reason in enumerate(reasons, start=1)]
    html = section(replace(run_of(), records=records))
    assert "Instances share prefixes of prompts: yes: step 2 can save 3 of 8 instance-seconds &amp; more.</p>" in html
    assert reasons[0] not in html


def test_a_run_without_plans_has_no_such_section() -> None:
    assert section(run_of({"reward": 1.0})) == ""


def test_what_a_prediction_does_not_define_is_no_metric() -> None:
    report = PredictionReport(4, 1, rank_correlation=None, prompt_rank_correlation=0.5, relative_error=0.3, bias=-0.1)
    assert report.metrics() == {
        "prediction/seen_share": 0.25,
        "prediction/prompt_rank_correlation": 0.5,
        "prediction/relative_error": 0.3,
        "prediction/bias": -0.1,
    }
