"""The report's section on drafting."""

from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.report.drafting import section
from rlhfless_operator.report.run import Run


def run_of(*metrics: dict[str, float]) -> Run:
    records = [StepRecord(step=step, metrics=each) for step, each in enumerate(metrics, start=1)]
    return Run(job_text="", job={}, status={}, summary={}, records=records, spans=[], samples=[])


def drafts(tried: float, accepted: float, unreadable: float = 0.0) -> dict[str, float]:
    return {
        "generation/tokens_per_pass": 1.5,
        "generation/drafts/tried": tried,
        "generation/drafts/accepted": accepted,
        "generation/drafts/seconds": 0.1,
        "generation/drafts/unreadable": unreadable,
        "generation/seconds": 2.0,
    }


def test_what_drafts_brought_and_cost_is_shown() -> None:
    html = section(run_of(drafts(0, 0), drafts(100, 80), drafts(300, 200)))
    assert "70.0 % of 400 drafted tokens" in html
    for title in ("Tokens a pass", "Drafted tokens", "Seconds of drafting"):
        assert title in html
    assert "could not be read" not in html


def test_history_that_could_not_be_read_is_told() -> None:
    assert "could not be read 3 times" in section(run_of(drafts(10, 5, unreadable=3)))


def test_a_run_that_drafted_nothing_has_no_such_section() -> None:
    assert section(run_of({"generation/tokens_per_pass": 1.0})) == ""
    assert section(run_of(drafts(0, 0))) == ""
