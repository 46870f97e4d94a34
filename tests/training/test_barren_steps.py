"""Whole jobs that have nothing to learn from: they go on, and say so."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.whole_jobs import MakeJob, folder_of, records_of, run_job

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

CONSTANT = "def reward(completions, **columns):\n    return [0.5] * len(completions)\n"


def job_with(make: MakeJob, reward: str, **overrides: Any) -> Path:
    file = make("job", **overrides)
    (file.parent / "reward.py").write_text(reward)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "reward"),
    [
        ({"name": "grpo", "kl": {"coefficient": 0.01}}, CONSTANT),
        pytest.param(
            {"name": "rloo", "kl": {"coefficient": 0.01, "placement": "reward", "estimator": "k1"}},
            CONSTANT,
            marks=pytest.mark.nightly,
        ),
        ({"name": "dapo", "dynamicSamplingRounds": 1}, CONSTANT),
        pytest.param({"name": "reinforce_plus_plus", "kl": None}, CONSTANT, marks=pytest.mark.nightly),
    ],
    ids=["grpo", "penalty in the reward", "dapo", "whitened"],
)
def test_equal_rewards_are_told_of_across_drivers(
    tiny_job: MakeJob, algorithm: dict[str, Any], reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_job(job_with(tiny_job, reward, steps=2, algorithm=algorithm))
    assert "warning: steps" not in capsys.readouterr().err, "twice is no harm"
    file = job_with(tiny_job, reward, steps=3, algorithm=algorithm)
    summary = run_job(file)
    told = capsys.readouterr().err
    assert (
        "warning: steps 1 to 3 had nothing to learn from: all samples of each group got the same reward, 0.5 on" in told
    )
    assert "warning: 3 of these steps had nothing to learn from" in told
    assert summary["steps_that_taught_nothing"] == 3
    assert "steps 1 to 3 had nothing to learn from" in (folder_of(file) / "report.html").read_text()


@pytest.mark.slow
def test_a_critic_learns_from_equal_rewards(tiny_job: MakeJob) -> None:
    file = job_with(tiny_job, CONSTANT, algorithm={"name": "ppo", "kl": None})
    assert run_job(file)["steps_that_taught_nothing"] == 0


@pytest.mark.slow
def test_what_teaches_is_counted_by_groups(tiny_job: MakeJob) -> None:
    file = tiny_job(steps=2)
    assert run_job(file)["steps_that_taught_nothing"] == 0
    assert all(record["metrics"]["batch/teaching_groups"] == 4 for record in records_of(file))
