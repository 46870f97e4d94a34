"""How well a run drafted, read from its metrics: of its last steps, and nothing where there is nothing."""

import json
from pathlib import Path

from rlhfless_operator.planner.latency.drafting import Drafts
from rlhfless_operator.training.costs.measured_drafts import ACCEPTANCE, COVERAGE, LAST_STEPS, measured_drafts


def write(folder: Path, steps: list[dict[str, float]]) -> str:
    lines = [json.dumps({"step": step, "metrics": metrics}) + "\n" for step, metrics in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return str(folder)


def test_the_last_steps_count(tmp_path: Path) -> None:
    steps = [{COVERAGE: 0.1, ACCEPTANCE: 0.1}] * 3 + [{COVERAGE: 0.5, ACCEPTANCE: 0.75}] * LAST_STEPS
    assert measured_drafts(write(tmp_path, steps)) == Drafts(0.5, 0.75)


def test_a_step_that_tried_nothing_says_nothing_of_acceptance(tmp_path: Path) -> None:
    steps = [{COVERAGE: 0.5, ACCEPTANCE: 0.75}, {COVERAGE: 0.5}, {}]
    assert measured_drafts(write(tmp_path, steps)) == Drafts(0.5, 0.75)


def test_what_drafted_nothing_or_is_no_run_has_none(tmp_path: Path) -> None:
    assert measured_drafts(write(tmp_path, [{COVERAGE: 0.0}, {"generation/seconds": 3.0}])) is None
    assert measured_drafts(str(tmp_path / "traces" / "lengths.parquet")) is None
