"""What is worked out from measured passes, and the table of policies with drafts and without."""

import pytest

from benchmarks.drafting.passes import BATCHES, DRAFTS, Drafted, gains, ratio
from benchmarks.drafting.policies import ACCEPTANCES, compare, table
from rlhfless_operator.planner.latency.drafting import Drafts
from tests.simulator.small_scenario import SMALL


def test_a_draft_pays_where_its_rows_take_less_than_what_is_right_of_it_saves() -> None:
    half = Drafted(coverage=1.0, acceptance=0.5)
    # One draft of which half is right: 1.5 tokens, so it pays below 1.5 times the time.
    assert ratio({0: 1.0, 1: 1.4}, half) == (pytest.approx(1.4 / 1.5), 1)
    assert ratio({0: 1.0, 1: 1.6}, half) == (1.0, 0)
    assert ratio({0: 1.0, 1: 1.6}, half, scale=0.5) == (pytest.approx(1.3 / 1.5), 1)
    # Rows of sequences without a draft are not there, and bring nothing.
    assert ratio({0: 1.0, 1: 1.4}, Drafted(0.5, 0.5)) == (pytest.approx(1.2 / 1.25), 1)


def test_what_a_step_gains_is_weighed_by_where_its_time_goes() -> None:
    # A row takes a tenth of a pass in every batch.
    rows = [
        {"sequences": float(batch), "drafts": float(each), "seconds": 1 + 0.1 * batch * (1 + each)}
        for batch in BATCHES
        for each in DRAFTS
    ]
    by_batch = {"1": {"seconds": 1.0, "passes": 1, "tokens": 1}, "128": {"seconds": 3.0, "passes": 1, "tokens": 128}}
    step = {
        "step": 9,
        "coverage": 1.0,
        "acceptance": 0.8,
        "cpu_against_never": 0.9,
        "never": {"seconds": 4.0, "by_batch": by_batch},
    }
    found = gains(rows, step)
    assert found["by_batch"]["128"]["drafts"] == 0
    alone = found["by_batch"]["1"]["ratio"]
    assert alone < 0.5
    assert found["whole_step"] == pytest.approx(0.25 * alone + 0.75)
    assert found["only_batches_up_to"]["1"] == pytest.approx(found["whole_step"])
    assert found["whole_step_if_rows_cost_nothing"] < 0.75
    assert 0 < found["row_cost_for_0.75"] < 1


def test_the_table_has_static_actors_with_drafts_and_without() -> None:
    assert all(isinstance(each.drafts, Drafts) and each.source for each in ACCEPTANCES)
    result = compare(SMALL, ACCEPTANCES[3], [0], (0.5,))
    names = [row["policy"] for row in result["policies"]]
    assert names[:2] == ["static", "static, drafts"]
    seconds = {row["policy"]: row["seconds"] for row in result["policies"]}
    assert seconds["static, drafts"] < seconds["static"]
    assert seconds["rlhfless, λ = 0.5, drafts"] < seconds["rlhfless, λ = 0.5"]
    lines = table([result]).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 1 + len(names)
    assert "1.00×, 0%" in lines[-len(names)]
