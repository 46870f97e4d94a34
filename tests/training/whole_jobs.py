"""Jobs that run from the beginning to the end on this machine, and what they leave."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhfless_functions import artifacts
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.local.local_run import run_locally
from rlhfless_operator.planner.history import History

MakeJob = Callable[..., Path]
"""Makes a job's file of a name and of what its spec is to have."""


async def train(file: Path, *, threads: int = 1) -> dict[str, Any]:
    """Run a job; its summary."""
    job = load_job(file).resolve_paths(file.parent)
    return await run_locally(job, f"{job.spec.artifacts.uri}/{job.metadata.name}", threads=threads)


def run_job(file: Path, *, threads: int = 1) -> dict[str, Any]:
    """Run a job in an event loop of its own; its summary."""
    return asyncio.run(train(file, threads=threads))


def run_until_a_step_cannot_be_written(
    file: Path, monkeypatch: pytest.MonkeyPatch, step: int, once: Callable[[], bool]
) -> None:
    """Run a job whose disk is full when a step is written down, `once` the rest has come as far as wanted."""
    write_json = artifacts.write_json

    def full(uri: str, value: Any) -> None:
        if uri.endswith(f"progress/step-{step:06d}.json"):
            deadline = time.monotonic() + 120
            while not once() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise artifacts.ArtifactUnwritableError("the disk is full")
        write_json(uri, value)

    with monkeypatch.context() as patched:
        patched.setattr(artifacts, "write_json", full)
        with pytest.raises(artifacts.ArtifactError, match="the disk is full"):
            run_job(file)


def folder_of(file: Path) -> Path:
    """The folder of a job whose artifacts are on this machine."""
    job = load_job(file).resolve_paths(file.parent)
    return Path(job.spec.artifacts.uri) / job.metadata.name


def records_of(file: Path) -> list[dict[str, Any]]:
    """The records of a job's steps, and of the evaluation before them where there is one."""
    return [json.loads(line) for line in (folder_of(file) / "metrics.jsonl").read_text().splitlines()]


def status_of(file: Path) -> dict[str, Any]:
    """What a job has written of its position last."""
    return _status_in(folder_of(file))


def _status_in(folder: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return status


def final_weights(file: Path) -> dict[str, torch.Tensor]:
    """The last weights of a job that has succeeded: its adapter's where it trains one."""
    return weights_in(folder_of(file))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """`final_weights` of the job with this folder."""
    status = _status_in(folder)
    assert status["phase"] == "Succeeded", status
    weights = status["weights"]
    if adapter := weights.get("adapter"):
        return load_file(Path(adapter) / "adapter_model.safetensors")
    # Several ranks write a file each.
    files = sorted(Path(weights["uri"]).glob("model*.safetensors"))
    assert files, weights
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """That they are the same bit for bit."""
    assert first
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def assert_same_final_weights(file: Path, other: Path) -> None:
    """That two jobs have succeeded with the same weights bit for bit."""
    assert_equal_weights(final_weights(file), final_weights(other))


def assume_measured(monkeypatch: pytest.MonkeyPatch, known: Mapping[str, float]) -> None:
    """Have a driver's plans take these for the means of what earlier steps took, by their names in its history."""
    mean = History.mean
    monkeypatch.setattr(
        History, "mean", lambda history, name, default=0.0: known.get(name) or mean(history, name, default)
    )


def half_written(folder: Path) -> list[Path]:
    """Version folders without a manifest, and temporary files."""
    kinds = ("data", "weights", "critics", "checkpoints")
    versions = [path for kind in kinds for path in (folder / kind).glob("*")] + [folder / "model"]
    incomplete = [path for path in versions if path.exists() and not any(path.glob("manifest*"))]
    return incomplete + [path for path in folder.rglob("*") if ".tmp" in path.name or path.name.startswith(".")]
