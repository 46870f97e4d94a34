"""Whole jobs whose stages take turns on GPUs, of which there are the names only: the weights are the same."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhfless_operator.job.validation import load_job
from rlhfless_operator.local.gpu_assignment import TooFewGpusError
from rlhfless_operator.local.local_run import RunOptions, run_locally

MakeJob = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")


def run_job(file: Path, monkeypatch: pytest.MonkeyPatch, gpus: str) -> Path:
    """Run a job where these GPUs are to be seen; returns its folder."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    job = load_job(file).resolve_paths(file.parent)
    root = f"{job.spec.artifacts.uri}/{job.metadata.name}"
    asyncio.run(run_locally(job, root, RunOptions(threads=1)))
    return Path(root)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    status = json.loads((folder / "status.json").read_text())
    return load_file(Path(status["weights"]["uri"]) / "model.safetensors")


def assert_equal(first: Path, second: Path) -> None:
    weights = weights_of(second)
    for name, tensor in weights_of(first).items():
        assert torch.equal(tensor, weights[name]), name


def most_at_once(folder: Path) -> int:
    """Most instances that had a GPU at one time."""
    spans = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    edges = sorted([(span["start"], 1) for span in spans] + [(span["end"], -1) for span in spans])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


def sleeps(folder: Path) -> set[str]:
    """Instances that have slept."""
    lines = [json.loads(line) for line in (folder / "logs" / "instances.jsonl").read_text().splitlines()]
    return {line["instance"] for line in lines if line["message"] == "instance sleeps"}


def test_one_gpu_is_enough_and_no_process_starts_twice(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: dict[str, Any] = {"generation": {"instances": {"max": 1}}}
    without = run_job(tiny_job("without", **spec), monkeypatch, "")
    turns = run_job(tiny_job("turns", **spec), monkeypatch, "0")
    assert_equal(without, turns)
    assert most_at_once(turns) == 1
    assert {name.split("-")[0] for name in sleeps(turns)} == {"generation", "preparation", "learning"}
    instances = {json.loads(line)["instance"] for line in (turns / "ledger.jsonl").read_text().splitlines()}
    assert len(instances) == 3


def test_a_learner_does_not_wait_on_the_gpu_that_its_batch_needs(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: dict[str, Any] = {
        "generation": {"instances": {"max": 1}},
        "learning": {"overlap": "auto"},
        "planning": {"policy": "cost"},
        "batch": {"minibatchSamples": 16},
    }
    apart = run_job(tiny_job("apart", **spec), monkeypatch, "0,1,2")
    turns = run_job(tiny_job("turns", **spec), monkeypatch, "0")
    assert_equal(apart, turns)
    assert most_at_once(turns) == 1


def test_more_actors_than_gpus_are_not_planned(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_job(tiny_job("job", generation={"instances": {"min": 2, "max": 2}}, steps=1), monkeypatch, "0")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["plan"]["actors"] for record in records] == [1]


def test_a_job_that_needs_more_gpus_than_there_are_leaves_nothing(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_job("job", learning={"processes": 2})
    with pytest.raises(TooFewGpusError, match=r"learning.processes is 2"):
        run_job(file, monkeypatch, "0")
    assert not (Path(load_job(file).spec.artifacts.uri) / "job").exists()
