"""A model over two ranks: what they gather and exchange, in which format, and how much memory each needs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rlhfless_functions import artifacts
from rlhfless_functions.learning import state as training_state
from rlhfless_functions.settings import AlgorithmSettings, BatchSettings, LearningSettings, OptimizerSettings
from tests.learning.jobs import PPO, Job, job_of

torch.set_num_threads(1)

OPTIMIZER = OptimizerSettings(learning_rate=1e-3, epsilon=1e-3)
SMALL_PASSES = BatchSettings(prompts_per_step=4, samples_per_prompt=2, minibatch_samples=8, microbatch_tokens=14)
LAYERS = 2
"""Of the tiny model."""

pytestmark = pytest.mark.usefixtures("warm_start")


def taken_by_two(job: Job, folder: Path, format: str = "narrow", gradients: str = "holding") -> list[dict[str, Any]]:
    """What two ranks found while they took the first step."""
    folder.mkdir()
    request = folder / "request"
    request.write_text(job.request(1, folder.name, learning=LearningSettings(processes=2)).model_dump_json())
    command = [sys.executable, "-m", "tests.learning.measured_rank", str(folder), str(request), format, gradients]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=Path(__file__).parents[2]) for rank in (0, 1)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


def tiny_job(folder: Path, model: Path, **given: Any) -> Job:
    return job_of(folder, model, **{"optimizer": OPTIMIZER, "batch_settings": SMALL_PASSES, **given})


def exchanges(found: dict[str, Any], kind: str) -> list[tuple[str, int]]:
    return [(dtype, size) for name, dtype, size in found["exchanged"] if name == kind]


def test_ranks_write_their_parts_in_several_files_of_one_model(tmp_path: Path, tiny_model: Path) -> None:
    job = tiny_job(tmp_path, tiny_model)
    job.undisturbed(1)
    taken_by_two(job, tmp_path / "two")
    folder = tmp_path / "two" / "weights-1"
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 4
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert artifacts.local_folder(str(folder))
    together = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "undisturbed" / "weights-1").state_dict().items()
    ):
        torch.testing.assert_close(together[name], tensor, rtol=0, atol=1e-6)


def test_layers_are_gathered_in_bfloat16_and_gradients_exchanged_once_in_float32(
    tmp_path: Path, tiny_model: Path
) -> None:
    job = tiny_job(tmp_path, tiny_model, dtype="bfloat16")
    parts = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values()) / 2
    (found, other), (each_time, _) = (
        taken_by_two(job, tmp_path / gradients, gradients=gradients) for gradients in ("holding", "exchanging")
    )
    gathers = exchanges(found, "all_gather_single")
    assert gathers == exchanges(other, "all_gather_single")
    assert {dtype for dtype, _ in gathers} == {"torch.bfloat16"}
    # Each pass gathers the root once, and each layer forward and backward.
    passes, rest = divmod(len(gathers), 1 + 2 * LAYERS)
    assert rest == 0
    assert passes > 2
    sums = exchanges(found, "reduce_scatter_single")
    assert {dtype for dtype, _ in sums} == {"torch.float32"}
    assert len(sums) == 1 + LAYERS, "once for all passes"
    assert sum(size for _, size in sums) == pytest.approx(2 * 4 * parts, rel=0.05)
    assert len(exchanges(each_time, "reduce_scatter_single")) == passes * (1 + LAYERS)
    for name, value in found["metrics"].items():
        if name.startswith("policy/"):
            assert each_time["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("algorithm", [AlgorithmSettings(), PPO], ids=["grpo", "ppo"])
def test_two_ranks_in_bfloat16_learn_what_one_learns(
    algorithm: AlgorithmSettings, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_state, "NARROWEST_ON_CPU", 1)
    monkeypatch.setattr(training_state, "has_bfloat16", lambda device: True)
    job = tiny_job(tmp_path, tiny_model, dtype="bfloat16", algorithm=algorithm)
    alone = job.undisturbed(1)[0].metrics
    for found in taken_by_two(job, tmp_path / "together"):
        for name, value in found["metrics"].items():
            if name.startswith(("policy/", "critic/", "mismatch/")):
                assert value == pytest.approx(alone[name], rel=0.02, abs=2e-3), name


def large_model(folder: Path, tiny_model: Path) -> Path:
    """110 MB in float32: small layers, so that a gathered one is little."""
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    size = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 14, "vocab_size": 1000}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**size, **heads, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_no_rank_holds_more_than_its_part(tmp_path: Path, tiny_model: Path) -> None:
    source = large_model(tmp_path / "model", tiny_model)
    whole = 2 * (source / "model.safetensors").stat().st_size
    job = tiny_job(tmp_path, source, dtype="bfloat16")
    found = taken_by_two(job, tmp_path / "together", gradients="exchanging")
    for each in found:
        assert each["held"]["load"] < 0.8 * whole, "half of the weights; 1.18 of them where each rank had loaded all"
    # Half of the weights, of their gradients and of two moments, and what is gathered. Autocast would keep all layers
    # in bfloat16 as well, which took 5.2 times the weights.
    peaks = [max(size for _, size in each["samples"]["train"]) for each in found]
    assert sum(peaks) / 2 < 4.3 * whole
    assert most_at_once(found, "load") < 1.3 * whole


def most_at_once(found: list[dict[str, Any]], phase: str) -> int:
    """The most that both ranks together had at a time."""
    events = sorted((time, rank, size) for rank, each in enumerate(found) for time, size in each["samples"][phase])
    now, most = [0, 0], 0
    for _, rank, size in events:
        now[rank] = size
        most = max(most, sum(now))
    return most


def test_files_with_other_names_are_loaded_whole_and_divided(tmp_path: Path, tiny_model: Path) -> None:
    """Of a body that was saved alone: its tensors lack the prefix that they have in memory."""
    source = tmp_path / "model"
    shutil.copytree(tiny_model, source)
    tensors = load_file(source / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, source / "model.safetensors", metadata={"format": "pt"})
    job = tiny_job(tmp_path, source)
    alone = job.undisturbed(1)[0].metrics
    for found in taken_by_two(job, tmp_path / "together", format="wide"):
        assert found["metrics"]["policy/loss"] == pytest.approx(alone["policy/loss"], rel=1e-4, abs=1e-6)
