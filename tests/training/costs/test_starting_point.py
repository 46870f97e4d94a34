"""What is known of an engine before it has generated anything."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.planner.latency.measured import MEASURED
from rlhfless_operator.training.costs.starting_point import starting_latency

REHEARSAL = {"trace": "trace.parquet", "gpu": "L40S", "model": "Qwen2.5-3B"}


def named(tiny_job: Callable[..., Path], **changes: object) -> RLHFJob:
    """A job whose model is one that was measured."""
    job = load_job(tiny_job(**changes))
    model = job.spec.model.model_copy(update={"source": "Qwen/Qwen2.5-7B-Instruct"})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"model": model})})


@pytest.mark.parametrize("product", ["L40S", "NVIDIA L40S", "NVIDIA-L40S"])
def test_a_known_gpu_begins_with_its_measured_table(tiny_job: Callable[..., Path], product: str) -> None:
    found = starting_latency(named(tiny_job, generation={"engine": "vllm"}), product)
    assert found == MEASURED["L40S", "Qwen2.5-7B", 1].linear()


@pytest.mark.parametrize("product", [None, "NVIDIA GeForce RTX 4090"])
def test_an_unknown_gpu_begins_with_nothing(tiny_job: Callable[..., Path], product: str | None) -> None:
    assert starting_latency(named(tiny_job), product) is None


def test_a_model_that_is_not_known_or_does_not_fit_begins_with_nothing(tiny_job: Callable[..., Path]) -> None:
    job = named(tiny_job)
    for source in ("a-model-of-our-own", "Qwen/Qwen2.5-72B"):
        model = job.spec.model.model_copy(update={"source": source})
        spec = job.spec.model_copy(update={"model": model})
        assert starting_latency(job.model_copy(update={"spec": spec}), "L40S") is None


def test_a_rehearsal_begins_with_its_emulated_gpu_in_seconds_of_here(tiny_job: Callable[..., Path]) -> None:
    scaled = load_job(tiny_job(rehearsal=REHEARSAL | {"timeScale": 0.1}))
    found = starting_latency(scaled, None)
    assert found is not None
    assert found.step_seconds == pytest.approx(MEASURED["L40S", "Qwen2.5-3B", 1].linear().step_seconds / 10)
