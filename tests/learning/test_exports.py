"""The trained model as a folder of Hugging Face's, whole or as an adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfless_functions.api import ExportRequest, TaskKey, WeightsReference
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.settings import (
    AlgorithmSettings,
    LoraSettings,
    ModelSettings,
)
from rlhfless_functions.weights import load_policy
from tests.learning.jobs import Job, context, job_of

torch.set_num_threads(1)

KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "adapter with dropout": {"dtype": "bfloat16", "lora": LoraSettings(rank=2, dropout=0.2)},
}


def export(job: Job, weights: WeightsReference) -> Path:
    destination = job.folder / "export"
    request = ExportRequest(
        key=TaskKey(job_uid="job", step=weights.version, stage="learning", part="export", attempt=0),
        result=str(job.folder / "export.json"),
        model=job.model,
        weights=weights,
        destination=str(destination),
        model_card="# How it was trained\n",
    )
    assert Learner().run(request, context()).uri == str(destination)
    return destination


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_the_policy_as_a_plain_hugging_face_folder(kind: str, tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, **KINDS[kind])
    job.undisturbed(2)
    folder = export(job, job.weights[2])
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert type(exported).__name__ == "Qwen3ForCausalLM"
    assert exported.dtype == torch.bfloat16
    assert (folder / "README.md").read_text() == "# How it was trained\n"
    assert (folder / "generation_config.json").exists()
    assert (
        AutoTokenizer.from_pretrained(folder)("1+2")["input_ids"]
        == AutoTokenizer.from_pretrained(tiny_model)("1+2")["input_ids"]
    )
    ids = torch.tensor([[5, 6, 7, 8]])
    trained = load_policy(job.model, job.weights[2], torch.float32)
    untrained = load_policy(job.model, job.initial, torch.float32)
    with torch.no_grad():
        expected, actual = trained(input_ids=ids).logits, exported.float()(input_ids=ids).logits
        distance = (untrained(input_ids=ids).logits - expected).abs().max()
    assert (actual - expected).abs().max() < 0.2 * distance
    assert not list(folder.rglob("adapter*"))


def test_an_export_can_be_the_adapter_alone(tmp_path: Path, tiny_model: Path) -> None:
    lora = LoraSettings(rank=2, export="adapter")
    job = Job(tmp_path, ModelSettings(source=str(tiny_model), dtype="float32", lora=lora), AlgorithmSettings())
    job.undisturbed(2)
    folder = export(job, job.weights[2])
    assert not list(folder.glob("model*"))
    assert (folder / "README.md").read_text() == "# How it was trained\n"
    exported = AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    trained = load_policy(job.model, job.weights[2], torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(exported(input_ids=ids).logits, trained(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<eos>"
