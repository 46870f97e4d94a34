"""Whole jobs whose artifacts are in an object store: instances fetch what changed of the weights alone."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from rlhfless_functions import artifacts
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.local.local_run import run_locally
from tests.training.whole_jobs import MakeJob, assert_equal_weights, final_weights, run_job

STEPS = 4
KEPT = {
    # In bfloat16 most weights stay what they were when a step is small.
    "model": {"dtype": "bfloat16"},
    "optimizer": {"learningRate": 1.0e-5},
    "generation": {"instances": {"min": 2, "max": 2}, "keepAlive": "10m"},
    "learning": {"keepAlive": "10m", "weightDeltas": "auto"},
    "steps": STEPS,
}
OWN_COPIES = """
import os

folder = os.environ["RLHFLESS_CACHE"]
os.register_at_fork(after_in_child=lambda: os.environ.update(RLHFLESS_CACHE=f"{folder}/{os.getpid()}"))
"""


@pytest.fixture
def own_copies(cold_start: None, artifact_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance has copies of its own, as pods do."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(OWN_COPIES)
    monkeypatch.setenv("PYTHONPATH", str(hook), prepend=":")


def run_in_store(file: Path, uri: str) -> list[dict[str, Any]]:
    """The records of its steps."""
    job = load_job(file).resolve_paths(file.parent)
    asyncio.run(run_locally(job, uri, threads=1))
    lines = artifacts.read_bytes(artifacts.join(uri, "metrics.jsonl")).splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def weights_in_store(uri: str) -> dict[str, torch.Tensor]:
    status = artifacts.read_json(artifacts.join(uri, "status.json"))
    files = [uri for uri in artifacts.list_files(status["weights"]["uri"]) if uri.endswith(".safetensors")]
    found = [load(artifacts.read_bytes(uri)) for uri in files if ".delta" not in uri]
    return {name: tensor for tensors in found for name, tensor in tensors.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("own_copies", "nothing_is_left_behind")
@pytest.mark.nightly
def test_instances_fetch_what_changed_and_learn_the_same(
    tiny_job: MakeJob, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = run_in_store(tiny_job("changed", **KEPT), f"{s3}/changed")
    first, *later = steps[-STEPS:]
    # Version 1 has no version before it that is published. Instances hold it from the second step on.
    assert "weights/delta_bytes" not in first
    assert all(step["weights/delta_bytes"] < 0.5 * step["weights/bytes"] for step in later)
    assert [step.get("weights/deltas", 0) for step in later] == [0, 2, 2]
    assert later[0]["weights/bytes_fetched"] == 2 * first["weights/bytes"]
    for before, step in pairwise(later):
        # Files that did not change are not fetched.
        assert step["weights/bytes_fetched"] == 2 * before["weights/delta_bytes"]
    assert not any("weights/deltas_refused" in step for step in steps)
    local = tiny_job("local", **KEPT)
    run_job(local)
    assert_equal_weights(weights_in_store(f"{s3}/changed"), final_weights(local))


@pytest.mark.slow
@pytest.mark.usefixtures("artifact_cache", "warm_start")
def test_instances_of_the_learner_s_machine_fetch_nothing(tiny_job: MakeJob, s3: str) -> None:
    steps = run_in_store(tiny_job("near", **KEPT), f"{s3}/near")[-STEPS:]
    assert all(step.get("weights/bytes_fetched", 0) == 0 for step in steps)
    assert "weights/delta_bytes" in steps[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "several",
    [{"processes": 2}, pytest.param({"instances": {"min": 2, "max": 2}}, marks=pytest.mark.nightly)],
    ids=str,
)
@pytest.mark.usefixtures("artifact_cache", "warm_start", "nothing_is_left_behind")
def test_learners_of_several_processes_publish_what_changed(
    several: dict[str, Any], tiny_job: MakeJob, s3: str
) -> None:
    settings = {**KEPT, "learning": {**KEPT["learning"], **several}, "steps": 2}
    first, *later = run_in_store(tiny_job("several", **settings), f"{s3}/several")[-2:]
    assert "weights/delta_bytes" not in first
    assert all(step["weights/delta_bytes"] < 0.5 * step["weights/bytes"] for step in later)
    assert not any("weights/deltas_refused" in step for step in later)
    local = tiny_job("local", **settings)
    run_job(local)
    assert_equal_weights(weights_in_store(f"{s3}/several"), final_weights(local))


@pytest.mark.slow
@pytest.mark.usefixtures("artifact_cache", "warm_start")
def test_a_job_does_without_unless_it_asks(tiny_job: MakeJob, s3: str) -> None:
    never = {**KEPT, "learning": {"keepAlive": "10m"}, "steps": 3}
    steps = run_in_store(tiny_job("without", **never), f"{s3}/without")
    assert not any("weights/delta_bytes" in step or "weights/deltas" in step for step in steps)
    assert steps[-1]["weights/bytes_fetched"] > 0
    assert [uri for uri in artifacts.list_files(f"{s3}/without/weights") if ".delta" in uri] == []
