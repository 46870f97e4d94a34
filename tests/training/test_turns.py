"""Whole jobs whose stages take turns on GPUs, of which there are the names only: the weights are the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.local.gpu_assignment import TooFewGpusError
from rlhfless_operator.local.local_run import JobFinishedError
from tests.training.whole_jobs import MakeJob, assert_same_final_weights, folder_of, records_of, run_job

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


def run_with(gpus: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run a job where these GPUs are to be seen; returns its file."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    run_job(file)
    return file


def spans_of(file: Path) -> list[dict[str, Any]]:
    """The states of a job's instances, as they were charged."""
    return [json.loads(line) for line in (folder_of(file) / "ledger.jsonl").read_text().splitlines()]


def most_at_once(file: Path) -> int:
    """Most instances that had a GPU at one time."""
    spans = [span for span in spans_of(file) if span["state"] != "asleep"]
    edges = sorted([(span["start"], 1) for span in spans] + [(span["end"], -1) for span in spans])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


def sleeps(file: Path) -> set[str]:
    """Instances that have slept."""
    lines = [json.loads(line) for line in (folder_of(file) / "logs" / "instances.jsonl").read_text().splitlines()]
    return {line["instance"] for line in lines if line["message"] == "instance sleeps"}


@pytest.mark.slow
def test_one_gpu_is_enough_and_no_process_starts_twice(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: dict[str, Any] = {"generation": {"instances": {"max": 1}}}
    without = run_with("", tiny_job("without", **spec), monkeypatch)
    turns = run_with("0", tiny_job("turns", **spec), monkeypatch)
    assert_same_final_weights(turns, without)
    assert most_at_once(turns) == 1
    assert {name.split("-")[0] for name in sleeps(turns)} == {"generation", "preparation", "learning"}
    assert len({span["instance"] for span in spans_of(turns)}) == 3
    ledger = {stage: account for record in records_of(turns) for stage, account in record["ledger"].items()}
    assert all(account["switching"] > 0 and account["asleep"] > 0 for account in ledger.values())


@pytest.mark.slow
def test_a_learner_does_not_wait_on_the_gpu_that_its_batch_needs(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: dict[str, Any] = {
        "generation": {"instances": {"max": 1}},
        "planning": {"policy": "cost"},
        "batch": {"minibatchSamples": 16},
    }
    apart = run_with("0,1,2", tiny_job("apart", **spec, learning={"overlap": "never"}), monkeypatch)
    turns = run_with("0", tiny_job("turns", **spec), monkeypatch)
    assert_same_final_weights(turns, apart)
    assert most_at_once(turns) == 1


def test_more_actors_than_gpus_are_not_planned(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    file = run_with("0", tiny_job("job", generation={"instances": {"min": 2, "max": 2}}, steps=1), monkeypatch)
    assert [record["plan"]["actors"] for record in records_of(file)] == [1]


def test_a_job_that_needs_more_gpus_than_there_are_leaves_nothing(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_job("job", learning={"processes": 2})
    with pytest.raises(TooFewGpusError, match=r"learning.processes is 2"):
        run_with("0", file, monkeypatch)
    assert not folder_of(file).exists()


@pytest.mark.slow
def test_a_job_that_names_no_number_has_an_actor_on_every_gpu_and_goes_on_where_there_are_others(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: dict[str, Any] = {"generation": {"instances": {"max": None}}, "checkpoints": {"everySteps": 1}}
    whole = run_with("", tiny_job("whole", **spec, steps=2), monkeypatch)
    run_with("0,1,2", tiny_job("moved", **spec, steps=1), monkeypatch)
    moved = run_with("0,1", tiny_job("moved", **spec, steps=2), monkeypatch)
    assert [record["plan"]["actors"] for record in records_of(whole)] == [1, 1]
    assert [record["plan"]["actors"] for record in records_of(moved)] == [3, 2]
    assert_same_final_weights(moved, whole)
    with pytest.raises(JobFinishedError, match="finished all of its 2 steps"):
        run_with("0", moved, monkeypatch)
