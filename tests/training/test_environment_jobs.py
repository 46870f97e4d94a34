"""Whole jobs whose model acts in an environment: actors and kills change no bit of the weights."""

import json
from pathlib import Path

import pytest

from tests.training.environment_jobs import MakeJob, eagerly, finish, kill_in_mid_episode, learnt_samples
from tests.training.environment_jobs import make_job as make_job  # A fixture.
from tests.training.killing import killed_at_writes
from tests.training.whole_jobs import assert_same_final_weights, folder_of, half_written, records_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(make_job: MakeJob) -> Path:
    file = make_job("one-actor", 1)
    finish(file)
    return file


def test_episodes_have_given_tokens_and_outcomes(undisturbed: Path) -> None:
    finished = learnt_samples(undisturbed)
    assert len(finished) == 2 * 4 * 3
    assert all(sample.outcome is not None and sample.given for sample in finished)
    assert max(len(sample.given) for sample in finished) > 2
    lines = (folder_of(undisturbed) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    samples = [json.loads(line) for line in (folder_of(undisturbed) / "samples.jsonl").read_text().splitlines()]
    roles = [[message["role"] for message in sample["messages"]] for sample in samples]
    assert roles and all(each[:2] == ["user", "assistant"] for each in roles)
    assert any("tool" in each for each in roles)


@pytest.mark.nightly
def test_three_actors_give_the_weights_of_one(make_job: MakeJob, undisturbed: Path) -> None:
    file = make_job("three-actors", 3)
    finish(file)
    assert_same_final_weights(file, undisturbed)


@pytest.mark.parametrize("how", ["replayed", pytest.param("begun-anew", marks=pytest.mark.nightly)])
def test_an_actor_that_is_killed_in_mid_episode_changes_nothing(make_job: MakeJob, undisturbed: Path, how: str) -> None:
    file = make_job(how, 1, replayable=how == "replayed")
    kill_in_mid_episode(file, "generation-")
    assert_same_final_weights(file, undisturbed)


@pytest.mark.nightly
def test_a_driver_that_is_killed_in_mid_episode_changes_nothing(make_job: MakeJob, undisturbed: Path) -> None:
    file = make_job("killed-driver", 1)
    kill_in_mid_episode(file, "driver")
    assert_same_final_weights(file, undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("share", [24, pytest.param(1, marks=pytest.mark.timeout(0))])
def test_a_driver_that_dies_at_its_writes_changes_nothing(
    make_job: MakeJob, undisturbed: Path, tmp_path: Path, share: int
) -> None:
    file = make_job(f"dying-{share}", 1)
    assert len(killed_at_writes(file, tmp_path, share)) >= 2
    assert_same_final_weights(file, undisturbed)
    assert half_written(folder_of(file)) == []


@pytest.mark.nightly
def test_an_environment_worker_that_is_killed_changes_nothing(make_job: MakeJob, undisturbed: Path) -> None:
    file = make_job("killed-worker", 1)
    kill_in_mid_episode(file, "rlhfless_functions.environments")
    assert_same_final_weights(file, undisturbed)


@pytest.mark.parametrize(
    "victim",
    [
        None,
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("driver", "generation-", "environments.shelter")),
    ],
)
def test_actors_that_are_let_go_while_environments_work_change_nothing(
    make_job: MakeJob, undisturbed: Path, victim: str | None
) -> None:
    file = make_job(f"let-go-{(victim or 'nobody').strip('-').replace('.', '-')}", 2, seconds=1.0, letGo="auto")
    if victim is None:
        finish(file, eagerly)
    else:
        kill_in_mid_episode(file, victim, eagerly)
    assert_same_final_weights(file, undisturbed)
    metrics = [record["metrics"] for record in records_of(file)]
    assert all(0 < each["generation/let_go"] < 1 for each in metrics)
    assert sum(each["environment/restarted"] for each in metrics) == 0, "the example's environment is replayable"
    if victim is None:
        assert sum(each["generation/lost_instances"] for each in metrics) == 0


@pytest.mark.nightly
def test_episodes_that_begin_anew_because_their_process_was_killed_change_nothing(
    make_job: MakeJob, undisturbed: Path
) -> None:
    file = make_job("let-go-begun-anew", 2, seconds=1.0, letGo="auto", replayable=False)
    kill_in_mid_episode(file, "environments.shelter", eagerly)
    assert_same_final_weights(file, undisturbed)
    assert sum(record["metrics"]["environment/restarted"] for record in records_of(file)) > 0
