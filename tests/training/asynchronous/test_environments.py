"""Asynchronous jobs whose model acts: episodes of several rollouts in a batch, newer weights in mid-episode, kills."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.asynchronous.test_loop import check_journal, replayed
from tests.training.environment_jobs import MakeJob, finish, kill_in_mid_episode, learnt_samples
from tests.training.environment_jobs import make_job as make_job  # A fixture.
from tests.training.test_switching import check_switched
from tests.training.whole_jobs import folder_of, half_written, records_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 4


def ahead(make_job: MakeJob, name: str, environment: dict[str, Any] | None = None, **settings: Any) -> Path:
    """A job whose rollouts go ahead of the learner, with two actors."""
    file = make_job(name, 2, seconds=0.2, **environment or {})
    job = yaml.safe_load(file.read_text())
    spec = job["spec"]
    spec["batch"] |= {"samplesPerPrompt": 4, "minibatchSamples": 8}
    spec |= {"async": {"maxStaleness": 1, **settings}, "steps": STEPS, "checkpoints": {"keepRollouts": True}}
    del spec["planning"]
    file.write_text(yaml.safe_dump(job))
    return file


def switching(file: Path) -> list[str]:
    """The command of a driver whose actors get newer weights in mid-episode, however fast the machine is."""
    return [sys.executable, "-m", "tests.training.switching", str(file), str(file.parent / "deaths.txt")]


def check(file: Path, *, switched: bool = False) -> None:
    """That each step learnt once, from whole episodes that were young enough, and that a replay has its weights."""
    if switched:
        check_switched(file, STEPS, 1)
    else:
        check_journal(file, STEPS, 1)
    samples = learnt_samples(file)
    assert len(samples) == STEPS * 4 * 4
    for sample in samples:
        assert sample.outcome is not None and sample.given
        assert sample.versions[0].start == 0 and sample.versions[-1].end == len(sample.response_tokens)
        assert all(log_prob == 0.0 for start, end in sample.given for log_prob in sample.log_probs[start:end])
    assert half_written(folder_of(file)) == []
    assert f"{STEPS} steps taken again: the same weights bit for bit" in replayed(file)


def test_rollouts_go_ahead_while_others_act(make_job: MakeJob) -> None:
    file = ahead(make_job, "ahead")
    finish(file)
    check(file)
    records = records_of(file)
    assert all(record["metrics"]["environment/turns"] > 1 for record in records if record["step"])
    assert max(record["metrics"].get("generation/staleness", 0.0) for record in records) > 0


def test_episodes_go_on_with_newer_weights(make_job: MakeJob) -> None:
    file = ahead(make_job, "switch", newWeights="switch")
    finish(file, switching)
    check(file, switched=True)
    assert any(len(sample.versions) > 1 for sample in learnt_samples(file))


@pytest.mark.nightly
def test_a_server_that_the_job_runs_has_the_episodes_of_all_rollouts(make_job: MakeJob) -> None:
    file = ahead(make_job, "served", {"served": {"sessions": 64}})
    finish(file)
    check(file)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["generation-", "rlhfless_functions.environments", "driver"])
@pytest.mark.parametrize("new_weights", ["finish", "switch"])
def test_whatever_is_killed_in_mid_episode_no_group_is_lost_or_doubled(
    make_job: MakeJob, victim: str, new_weights: str
) -> None:
    file = ahead(make_job, f"killed-{victim.strip('-').rpartition('.')[2]}-{new_weights}", newWeights=new_weights)
    kill_in_mid_episode(file, victim)
    check(file, switched=new_weights == "switch")
