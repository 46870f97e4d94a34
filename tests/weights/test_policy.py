"""A policy's weights: what transformers loads, we load, to the bit; what we publish, transformers loads."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config

from rlhfless_functions import artifacts
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import load_config, load_policy, load_tokenizer, publish_weights, saving, swap_policy
from tests.weights.random_models import CONFIGS, SIZES, logits, nudge, random_model, settings_of, version
from tests.weights.random_models import tiny as tiny  # A fixture.

# --- loading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_computes_what_transformers_own_does(name: str, dtype: str, tmp_path: Path) -> None:
    folder = random_model(CONFIGS[name], tmp_path / "model")
    ours = load_policy(settings_of(folder, dtype=dtype), version(folder))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    assert {parameter.dtype for parameter in ours.parameters()} == {getattr(torch, dtype)}
    assert not ours.training
    assert torch.equal(logits(ours), logits(theirs))
    for (ours_name, buffer), (_, expected) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), ours_name
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_published_is_what_transformers_loads_and_what_swaps_in(name: str, tmp_path: Path) -> None:
    folder = random_model(CONFIGS[name], tmp_path / "0")
    policy = load_policy(settings_of(folder), version(folder))
    other = load_policy(settings_of(folder), version(folder))
    nudge(policy)
    published = str(tmp_path / "1")
    publish_weights(published, policy, None)
    assert not torch.equal(logits(policy), logits(other))
    swap_policy(other, version(published, 1))
    for model in (
        other,
        load_policy(settings_of(folder), version(published, 1)),
        AutoModelForCausalLM.from_pretrained(published),
    ):
        assert torch.equal(logits(model), logits(policy))
    swap_policy(other, version(folder))
    assert torch.equal(logits(other), logits(AutoModelForCausalLM.from_pretrained(folder)))


def test_a_published_version_is_a_complete_folder(tiny: ModelSettings, tmp_path: Path) -> None:
    policy = load_policy(tiny, version(tiny.source))
    policy.generation_config = GenerationConfig(eos_token_id=[1, 5], pad_token_id=0)
    tokenizer = load_tokenizer(tiny, version(tiny.source))
    for number in (1, 2):  # The second is written from what the first has kept.
        uri = str(tmp_path / str(number))
        publish_weights(uri, policy, tokenizer, texts={"README.md": "# Trained"})
        assert AutoTokenizer.from_pretrained(uri)("12+3=").input_ids == tokenizer("12+3=").input_ids
        assert GenerationConfig.from_pretrained(uri).eos_token_id == [1, 5]
        assert load_policy(tiny, version(uri, 1)).generation_config.eos_token_id == [1, 5]
        assert AutoConfig.from_pretrained(uri).architectures == ["Qwen3ForCausalLM"]
        assert (tmp_path / str(number) / "README.md").read_text() == "# Trained"
        assert artifacts.local_folder(uri)
    names = load_file(tmp_path / "1" / "model.safetensors").keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_weights_are_published_in_the_format_asked_for(tiny: ModelSettings, tmp_path: Path) -> None:
    policy = load_policy(tiny, version(tiny.source))
    publish_weights(str(tmp_path / "1"), policy, None, torch.bfloat16)
    tensors = load_file(tmp_path / "1" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(tmp_path / "1").dtype == torch.bfloat16
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    rounded = load_policy(tiny, version(tmp_path / "1", 1))
    assert torch.equal(rounded.lm_head.weight, policy.lm_head.weight.bfloat16().float())


def test_large_weights_are_published_in_shards(
    tiny: ModelSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "SHARD_BYTES", 20_000)
    policy = load_policy(tiny, version(tiny.source))
    uri = str(tmp_path / "1")
    publish_weights(uri, policy, None)
    assert len(list((tmp_path / "1").glob("model-*.safetensors"))) > 2
    other = load_policy(tiny, version(tiny.source))
    nudge(other)
    swap_policy(other, version(uri, 1))
    for model in (other, load_policy(tiny, version(uri, 1)), AutoModelForCausalLM.from_pretrained(uri)):
        assert torch.equal(logits(model), logits(policy))


def test_tied_weights_stay_tied(tiny: ModelSettings, tmp_path: Path) -> None:
    policy = load_policy(tiny, version(tiny.source))
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    tensors = load_file(Path(tiny.source) / "model.safetensors")
    shutil.copytree(tiny.source, tmp_path / "both")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
              tmp_path / "both" / "model.safetensors", {"format": "pt"})  # fmt: skip
    both = load_policy(settings_of(tmp_path / "both"), version(tmp_path / "both"))
    assert both.lm_head.weight is both.model.embed_tokens.weight
    assert torch.equal(logits(both), logits(policy))


def test_weights_go_through_an_object_store(tiny: ModelSettings, s3: str, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("RLHFLESS_CACHE", str(tmp_path))
    policy = load_policy(tiny, version(tiny.source))
    nudge(policy)
    tokenizer = load_tokenizer(tiny, version(tiny.source))
    uri = artifacts.join(s3, "weights/1")
    publish_weights(uri, policy, tokenizer)
    other = load_policy(tiny, version(tiny.source))
    swap_policy(other, version(uri, 1))
    assert torch.equal(logits(other), logits(policy))
    assert load_tokenizer(tiny, version(uri, 1))("1").input_ids == tokenizer("1").input_ids
    assert load_config(uri).vocab_size == 64


# --- what cannot be loaded ---------------------------------------------------------------------------------------


def without_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def with_another_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def with_integers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, folder / "model.safetensors")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def of_another_size(folder: Path) -> None:
    random_model(Qwen3Config(**{**SIZES, "hidden_size": 16}, head_dim=16), folder)


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])


DAMAGES = [without_a_weight, with_another_shape, with_integers, without_weights, of_another_size, damaged]


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_do_not_fit_are_refused_and_the_policy_stays_as_it_was(
    damage: Callable[[Path], None], tiny: ModelSettings, tmp_path: Path
) -> None:
    policy = load_policy(tiny, version(tiny.source))
    before = logits(policy)
    nudge_source = load_policy(tiny, version(tiny.source))
    nudge(nudge_source)
    nudge_source.save_pretrained(tmp_path / "bad")
    damage(tmp_path / "bad")
    with pytest.raises(TaskError, match=r"/bad ") as caught:
        swap_policy(policy, version(tmp_path / "bad", 1))
    assert caught.value.reason == "model_unloadable"
    assert torch.equal(logits(policy), before)


@pytest.mark.parametrize("damage", [without_a_weight, with_another_shape, without_weights, damaged])
def test_an_incomplete_model_is_not_loaded(damage: Callable[[Path], None], tiny: ModelSettings, tmp_path: Path) -> None:
    shutil.copytree(tiny.source, tmp_path / "bad")
    damage(tmp_path / "bad")
    with pytest.raises(TaskError, match=r"/bad .*give ") as caught:
        load_policy(settings_of(tmp_path / "bad"), version(tmp_path / "bad"))
    assert caught.value.reason == "model_unloadable"


def test_a_published_version_that_is_corrupt_never_reaches_the_policy(tiny: ModelSettings, tmp_path: Path) -> None:
    policy = load_policy(tiny, version(tiny.source))
    before = logits(policy)
    publish_weights(str(tmp_path / "1"), policy, None)
    data = bytearray((tmp_path / "1" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "1" / "model.safetensors").write_bytes(data)
    with pytest.raises(TaskError, match=r"model\.safetensors is corrupt") as caught:
        swap_policy(policy, version(tmp_path / "1", 1))
    assert caught.value.reason == "artifact_missing"
    assert torch.equal(logits(policy), before)


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_model_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(TaskError, match=rf"{folder} "):
            load_policy(settings_of(folder), version(folder))
        with pytest.raises(TaskError, match=rf"{folder} "):
            load_tokenizer(settings_of(folder), version(folder))


def test_weights_that_may_not_be_read_are_told_from_weights_that_are_not_there(
    tiny: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of another user, as safetensors itself makes them: it calls them missing."""
    read = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "model.safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(TaskError, match=r"Permission denied: .*model\.safetensors"):
        load_policy(tiny, version(Path(tiny.source)))


def test_a_file_is_no_model(tiny: ModelSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.source)
    with pytest.raises(TaskError, match=r"config\.json is a file: give the folder"):
        load_config("config.json")


def test_a_hub_name_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TaskError, match=r"nobody/nothing is no folder here, and the Hugging Face hub did not give it"):
        load_policy(settings_of("nobody/nothing"), version("nobody/nothing"))


def test_quantized_weights_are_refused(tiny: ModelSettings, tmp_path: Path) -> None:
    shutil.copytree(tiny.source, tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(TaskError, match=r"/q holds quantized weights, which cannot be trained"):
        load_policy(settings_of(tmp_path / "q"), version(tmp_path / "q"))


def test_a_full_disk_stops_a_publication_and_leaves_nothing(
    tiny: ModelSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(tiny, version(tiny.source))

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("rlhfless_functions.weights.saving.save_file", full)
    with pytest.raises(TaskError, match=r"/1 cannot be written: no space is left") as caught:
        publish_weights(str(tmp_path / "1"), policy, None)
    assert caught.value.reason == "artifact_unwritable"
    assert list(tmp_path.iterdir()) == []
