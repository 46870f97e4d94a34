"""The families of models that people have, on vLLM: what it samples is what the transformers engine does."""

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config

from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings, ModelSettings
from rlhfless_functions.weights import load_policy, publish_adapter, publish_weights, saving
from tests.generation.engines.shares import assert_same, generate, reference_log_probs, settings_of, share, version
from tests.model.families import CAPPED, EVERY, WINDOW, save

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from rlhfless_functions.generation.engines.vllm.engine import VllmEngine

torch.set_num_threads(1)

ALWAYS = ("qwen2.5, tied", "qwen3, experts", "llama 3", "gemma 3", "phi 3")
"""Families that are tried for every change; the others are tried nightly."""


def trained(folder: Path, to: Path) -> Path:
    """Another version of all weights, as the learner publishes it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    with patch.object(saving, "SHARD_BYTES", 30_000):
        publish_weights(str(to), model, AutoTokenizer.from_pretrained(folder))
    return to


def adapter(model: ModelSettings, to: Path) -> str:
    """A published adapter that does something."""
    policy = load_policy(model, version(Path(model.source)))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    publish_adapter(str(to), policy)
    return str(to)


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.nightly) for name in EVERY]
)
def test_a_family_is_sampled_as_by_the_other_engine(name: str, tmp_path: Path, tiny_model: Path) -> None:
    folder = save(EVERY[name], tmp_path / "model", tiny_model)
    assert (folder / "model.safetensors.index.json").exists()
    plain, adapted = settings_of(folder), settings_of(folder, lora=LoraSettings(rank=4))
    cases = [
        (plain, version(folder)),
        (plain, version(trained(folder, tmp_path / "next"), 1)),
        (adapted, version(folder)),
        (adapted, version(folder, 1, adapter(adapted, tmp_path / "adapter"))),
    ]
    # First of all, since vLLM changes transformers' classes of what it has no code of its own for.
    reference, wanted = TransformersEngine(), []
    for model, weights in cases:
        reference.load(model, weights)
        wanted.append(generate(reference, share(8, 1)))
    assert any(len(result.response_tokens) > WINDOW + 4 for result in wanted[0].values())
    assert wanted[0] == wanted[2] != wanted[1]
    assert wanted[2] != wanted[3]
    engine, rounds = VllmEngine(), list(zip(cases, wanted, strict=True))
    if "experts" in name and not torch.cuda.is_available():
        with pytest.raises(TaskError, match=r"cannot be loaded .*set generation\.engine to transformers"):
            engine.load(*cases[2])
        del rounds[2:]
    for (model, weights), results in rounds:
        engine.load(model, weights)
        assert_same(generate(engine, share(8, 1)), results)


def test_attention_with_a_cap_is_the_models_own(tmp_path: Path, tiny_model: Path) -> None:
    folder = save(CAPPED, tmp_path / "model", tiny_model)
    engine, tasks = VllmEngine(), share(8, 1)
    engine.load(settings_of(folder), version(folder))
    for key, result in generate(engine, tasks).items():
        (task,) = (each for each in tasks if (each.prompt, each.index) == key)
        expected = reference_log_probs(folder, task, result.response_tokens, 1.0)
        assert result.log_probs == pytest.approx(expected, abs=2e-5)


def test_what_is_refused_is_refused_before_vllm_is_started(tmp_path: Path, tiny_model: Path) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    pickled = Path(shutil.copytree(tiny_model, tmp_path / "pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for folder, message in (
        (tmp_path / "t5", r"t5 holds an encoder-decoder model \(t5\): give a decoder-only model"),
        (pickled, r"pickled has its weights in pytorch_model.bin and none as safetensors: convert it"),
    ):
        with pytest.raises(TaskError, match=message) as caught:
            VllmEngine().load(settings_of(folder), version(folder))
        assert caught.value.reason == "model_unloadable"
