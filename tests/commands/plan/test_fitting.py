"""`rlhfless plan`: the GPUs that it chooses by their memory, and what it refuses."""

from pathlib import Path

import pytest

from tests.commands.plan.forecasts import forecast, refusal

FULL = ("--set", "spec.model.lora=null")
NO_REFERENCE = ("--set", "spec.algorithm.kl=null")


def test_what_is_left_out_is_chosen_so_that_it_fits(job: Path) -> None:
    found = forecast(job, "--gpu", "H100", *FULL, "--set", "spec.model.source=Qwen/Qwen2.5-7B")
    assert found["chosen"] == ["generation.vllm.tensorParallelSize: 1", "learning.processes: 4"]
    assert found["learner_gpus"] == 4 and found["memory"]["learning"] < 80e9
    assert {row["learner_gpus"] for row in found["front"]} == {4, 8}
    named = forecast(job, "--gpu", "H100", *FULL, "--set", "spec.learning.processes=8")
    assert named["learner_gpus"] == 8 and {row["learner_gpus"] for row in named["front"]} == {8}
    large = forecast(job, "--gpu", "H100", "--set", "spec.model.source=Qwen/Qwen2.5-72B", *NO_REFERENCE)
    assert (large["gpus"], large["learner_gpus"]) == (4, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("model.source=Qwen/Qwen2.5-32B", "learning.processes=1"), "learning.processes is 1: Qwen2.5-32B needs"),
        (
            ("learning.processes=1", "batch.microbatchTokens=4096", "sampling.maxResponseTokens=1024"),
            "the least that fits is learning.processes: 2",
        ),
        (("learning.gradientCheckpointing=false",), "learning.gradientCheckpointing: true"),
        (("model.source=Qwen/Qwen2.5-72B", "optimizer.name=muon"), "learning.processes is left out"),
    ],
)
def test_a_learner_that_does_not_fit_is_refused_with_the_least_that_does(
    job: Path, settings: tuple[str, ...], message: str
) -> None:
    options = [option for setting in settings for option in ("--set", f"spec.{setting}")]
    assert message in refusal(job, "--gpu", "H100", *FULL, *options)


def test_a_reference_model_that_one_gpu_does_not_hold_is_refused(job: Path) -> None:
    kl = ("--set", "spec.algorithm.kl={coefficient: 0.01}", "--set", "spec.model.source=Qwen/Qwen2.5-72B")
    assert "it computes on a single GPU: set algorithm.kl.coefficient: 0" in refusal(job, "--gpu", "H100", *kl)


def test_a_mixture_of_experts_needs_its_size_and_computes_as_its_active_part(job: Path) -> None:
    moe = forecast(job, "--gpu", "H200", "--model", "Qwen/Qwen3-30B-A3B")
    dense = forecast(job, "--gpu", "H200", "--model", "Qwen/Qwen3-32B")
    assert moe["memory"]["generation"] > 0.8 * dense["memory"]["generation"]
    assert moe["learning_seconds"] < dense["learning_seconds"] / 5


def test_neither_rewards_nor_data_need_to_be_here(job: Path) -> None:
    for file in job.parent.iterdir():
        if file != job and file.is_file():
            file.unlink()
    assert forecast(job, "--gpu", "L40S")["plans"]
