"""The outputs of a learning step: versions, their bytes, and metrics."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    JournalledPiece,
    WeightsReference,
    piece_uri,
)
from rlhfless_functions.api.metrics import LEARNING_METRICS
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    ImportanceSamplingSettings,
    RejectionSettings,
)
from tests.learning.jobs import JOBS, Job, assert_equal, context, job_of, samples_of

torch.set_num_threads(1)


def test_what_is_published_is_a_hugging_face_folder_in_the_model_s_format(tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, **JOBS["bfloat16"])
    (result,) = job.undisturbed(1)
    assert result.weights == WeightsReference(version=1, uri=str(tmp_path / "undisturbed" / "weights-1"))
    assert result.checkpoint == str(tmp_path / "undisturbed" / "checkpoint-1")
    assert {tensor.dtype for tensor in job.published(1).values()} == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(result.weights.uri)
    assert loaded.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(result.weights.uri).eos_token == "<eos>"
    master = load_file(tmp_path / "undisturbed" / "checkpoint-1" / "policy.safetensors")
    assert {tensor.dtype for tensor in master.values()} == {torch.float32}


def test_only_the_adapter_is_published(tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, **JOBS["adapter with dropout"])
    (result,) = job.undisturbed(1)
    folder = str(tmp_path / "undisturbed" / "weights-1")
    assert result.weights == WeightsReference(version=1, uri=str(tiny_model), adapter=folder)
    assert all("lora_" in name for name in job.published(1))
    assert all("lora_" in name for name in load_file(tmp_path / "undisturbed" / "checkpoint-1" / "policy.safetensors"))


@pytest.mark.parametrize("kind", ["grpo", "adapter with dropout"])
def test_a_version_s_bytes_are_told_beside_those_of_all_weights(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, **JOBS[kind])
    (result,) = job.undisturbed(1)
    files = [path for path in (tmp_path / "undisturbed" / "weights-1").iterdir() if path.name != "manifest.json"]
    shipped, full = result.metrics["weights/bytes"], result.metrics["weights/full_bytes"]
    assert shipped == sum(path.stat().st_size for path in files)
    in_file = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    assert full == in_file * (4 if kind == "grpo" else 2)
    tensors = sum(tensor.nbytes for tensor in job.published(1).values())
    assert (tensors == full) == (kind == "grpo")


def test_the_critic_is_published_beside_the_policy(tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, **JOBS["ppo"])
    first, second = job.undisturbed(2)
    assert first.critic == WeightsReference(version=1, uri=str(tmp_path / "undisturbed" / "critic-1"))
    initial = {
        f"weights-1/model.safetensors/{name}": tensor
        for name, tensor in load_file(tiny_model / "model.safetensors").items()
    }
    published = {name: tensor for name, tensor in job.published(1).items() if name.startswith("weights")}
    assert_equal(published, initial)  # the critic's warm-up
    assert first.metrics["policy/learning_rate"] == 0
    assert second.metrics["policy/learning_rate"] > 0


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_metrics_are_finite_numbers_under_documented_names(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, **JOBS[kind])
    metrics = job.undisturbed(2)[-1].metrics
    assert metrics.keys() <= LEARNING_METRICS.keys()
    expected = {
        "policy/loss", "policy/entropy", "policy/kl", "policy/clip_fraction_low", "policy/clip_fraction_high",
        "policy/ratio_min", "policy/ratio_max", "policy/gradient_norm", "policy/learning_rate", "kl/reference",
        "mismatch/mean_exp_abs", "mismatch/k3", "advantage/mean", "advantage/std", "lengths/mean", "lengths/max",
        "tokens", "seconds", "seconds/train", "seconds/publish",
    }  # fmt: skip
    if kind == "ppo":
        expected |= {"value/loss", "value/explained_variance", "value/clip_fraction", "value/gradient_norm"}
    assert expected <= metrics.keys()
    assert metrics["policy/updates"] == 2
    assert metrics["batch/samples"] == 8
    assert metrics["batch/zero_variance_groups"] == 0
    assert metrics["lengths/max"] == max(len(sample.response_tokens) for sample in samples_of(2))


def test_every_documented_metric_is_made(tmp_path: Path, tiny_model: Path) -> None:
    made: set[str] = set()
    job = job_of(tmp_path, tiny_model, **JOBS["ppo"])
    for result in job.undisturbed(2):
        made |= result.metrics.keys()
    made |= Learner().run(job.request(2, "again"), context()).metrics.keys()
    made |= Learner().run(job.request(1, "beside", publish_beside=True), context()).metrics.keys()
    one_update = BatchSettings(prompts_per_step=4, samples_per_prompt=2)
    journal = str(job.folder / "pieces")
    piece = JournalledPiece(samples=job.batch(1).samples, parts=job.batch(1).parts)
    artifacts.write_json(piece_uri(journal, 0), piece.model_dump(mode="json"))
    following = {"following": journal, "batch_settings": one_update}
    rejecting = ImportanceSamplingSettings(low=0.5, rejection=RejectionSettings(high=2.0))
    bounded = AlgorithmSettings(importance_sampling=rejecting)
    plain = Job(tmp_path / "followed", job.model, bounded, **following)
    made |= Learner().run(plain.request(1), context()).metrics.keys()
    # A state wakes where it has left a device: test_sleep.py. Deltas need an object store: test_weight_deltas.py.
    # A fresh learner takes its state up ahead of the step, and writes a checkpoint beside the next one:
    # test_saved_learners.py.
    beside = {"seconds/taken_up", "seconds/checkpoint", "seconds/checkpoint_wait"}
    assert LEARNING_METRICS.keys() - made == {"seconds/wake", "weights/delta_bytes", *beside}
    assert made <= LEARNING_METRICS.keys()
