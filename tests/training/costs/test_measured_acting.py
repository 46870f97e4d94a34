"""How a run's samples acted, read from its metrics: of its last steps, and nothing where there is nothing."""

from pathlib import Path

from rlhfless_operator.training.costs.measured_acting import ActingByToken, measured_acting
from rlhfless_operator.training.costs.measured_drafts import LAST_STEPS
from tests.training.costs.test_measured_drafts import write


def acted(away: float, given: float) -> dict[str, float]:
    return {"environment/turns": 4.0, "lengths": 50.0, "environment/seconds_away": away, "environment/given": given}


def test_the_last_steps_count(tmp_path: Path) -> None:
    steps = [acted(900.0, 900.0)] * 3 + [acted(100.0, 25.0)] * LAST_STEPS
    assert measured_acting(write(tmp_path, steps)) == ActingByToken(away=2.0, given=0.5)


def test_what_acted_nowhere_or_is_no_run_has_none(tmp_path: Path) -> None:
    assert measured_acting(write(tmp_path, [{"lengths": 50.0}, {}])) is None
    assert measured_acting(str(tmp_path / "traces" / "lengths.parquet")) is None
