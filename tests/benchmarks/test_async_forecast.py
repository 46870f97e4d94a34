"""The forecast of rehearsed jobs: which of them it has, and what it makes of their settings."""

import pytest

from benchmarks.simulator.asynchronous_forecast import COMPARED, compare

SETTINGS = {"gpus": 4, "learner_gpus": 2, "prompts": 2, "steps": 12, "time_scale": 1.0, "keep_alive": "10m"}


def test_jobs_with_split_gpus_are_forecast_beside_what_was_measured() -> None:
    measured = dict.fromkeys(COMPARED, 20.0) | {"moved_samples": 0.0}
    arms = ("static", "async-1", "async-2", "async-2-repack", "colocated")
    rows = compare({"settings": SETTINGS, "runs": dict.fromkeys(arms, measured)})
    assert [row["arm"] for row in rows] == ["static", "async-1", "async-2"]
    static, one, two = (row["forecast"] for row in rows)
    assert (static["staleness_mean"], one["staleness_mean"]) == (0, 1)
    assert static["step_seconds"] > max(one["step_seconds"], two["step_seconds"])
    for row in rows:
        found = row["forecast"]
        assert row["step_seconds_error"] == pytest.approx(found["step_seconds"] / 20 - 1)
        assert found["learner_busy_seconds"] == pytest.approx((1 - found["learner_idle"]) * found["step_seconds"])
        assert found["actors_busy_seconds"] == pytest.approx((1 - found["actors_idle"]) * 2 * found["step_seconds"])
