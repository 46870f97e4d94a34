"""Learning that begins while the batch is still being generated, on GPUs that stages use in turns."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.processes import named
from tests.training.overlapping import (
    OVERLAPPED,
    Overlap,
    journal_of,
    learn_again,
    stop_once_its_learner_waits,
)
from tests.training.test_turns import most_at_once
from tests.training.whole_jobs import (
    MakeJob,
    records_of,
    run_job,
    status_of,
)

IN_TURNS: dict[str, Any] = {
    **OVERLAPPED,
    "generation": {"instances": {"max": 3}},
    # Those that prepare have their GPUs until all groups are prepared.
    "preparation": {"instances": {"max": 1}},
}

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of GPUs: too few for three actors, one that prepares and a learner."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")


def test_a_learner_takes_the_gpus_that_actors_have_left(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap = Overlap(monkeypatch)
    file = tiny_job("turns", **IN_TURNS)
    run_job(file)
    assert overlap.waits >= 2
    assert most_at_once(file) <= 3
    for step in (1, 2):
        assert len(journal_of(file, step)) > 1
    for record in records_of(file):
        assert "learning/beyond_preparation" in record["metrics"], "its learner had begun before"
    learn_again(file, tmp_path / "again")


@pytest.mark.slow
def test_a_learner_that_is_not_kept_between_its_tasks_waits_for_the_whole_batch(tiny_job: MakeJob) -> None:
    file = tiny_job("ends", **{**IN_TURNS, "learning": {"keepAlive": "0s"}, "steps": 1})
    run_job(file)
    assert journal_of(file, 1) == []


@pytest.mark.slow
def test_a_learner_in_turns_that_is_killed_in_mid_step_goes_by_the_journal(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []

    def kill_the_first(name: str) -> bool:
        if not killed:
            (victim,) = named(name)
            victim.kill()
            killed.append(name)
        return True

    Overlap(monkeypatch, kill_the_first)
    file = tiny_job("killed-in-turns", **IN_TURNS)
    run_job(file)
    assert killed
    learn_again(file, tmp_path / "again")


@pytest.mark.slow
def test_a_driver_that_is_stopped_while_its_learner_uses_the_gpus_of_actors_is_gone_on_from_by_the_journal(
    tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_job("stopped-in-turns", **IN_TURNS)
    asyncio.run(stop_once_its_learner_waits(file, monkeypatch, pieces=1))
    written = journal_of(file, 1)
    assert written and status_of(file)["step"] == 0
    Overlap(monkeypatch)
    run_job(file)
    assert journal_of(file, 1)[: len(written)] == written
    learn_again(file, tmp_path / "again")
