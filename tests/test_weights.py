"""Weights: what transformers loads, we load, to the bit; what we publish, transformers loads."""

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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.settings import LoraSettings, ModelSettings
from rlhfless_functions.task import TaskError
from rlhfless_functions.weights import (
    CriticModel,
    load_config,
    load_critic,
    load_policy,
    load_tokenizer,
    merge_adapter,
    publish_adapter,
    publish_critic,
    publish_weights,
    swap_critic,
    swap_policy,
)

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, attn_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16),
    "mistral": MistralConfig(**SIZES, head_dim=16, sliding_window=8),
    "phi3": Phi3Config(**SIZES),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=16),
    "gpt2": GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=2, n_positions=64),
}
TOKENS = torch.randint(0, 48, (2, 20), generator=torch.Generator().manual_seed(0))


def random_model(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def settings_of(folder: Path | str, **fields: Any) -> ModelSettings:
    return ModelSettings(source=str(folder), **{"dtype": "float32", **fields})


def version(uri: Path | str, number: int = 0, adapter: Path | str | None = None) -> WeightsReference:
    return WeightsReference(version=number, uri=str(uri), adapter=str(adapter) if adapter else None)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def nudge(model: torch.nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Change weights as learning would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if wanted(name):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def of_adapter(name: str) -> bool:
    return "lora_" in name


@pytest.fixture
def tiny(tiny_model: Path) -> ModelSettings:
    return settings_of(tiny_model)


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
        publish_weights(uri, policy, tokenizer, readme="# Trained")
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


def test_large_weights_are_published_in_shards(tiny: ModelSettings, tmp_path: Path) -> None:
    policy = load_policy(tiny, version(tiny.source))
    uri = str(tmp_path / "1")
    publish_weights(uri, policy, None, shard_bytes=20_000)
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

    monkeypatch.setattr("rlhfless_functions.weights.saving.save_torch_state_dict", full)
    with pytest.raises(TaskError, match=r"/1 cannot be written: no space is left") as caught:
        publish_weights(str(tmp_path / "1"), policy, None)
    assert caught.value.reason == "artifact_unwritable"
    assert list(tmp_path.iterdir()) == []


# --- adapters ----------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted(tiny: ModelSettings) -> ModelSettings:
    return tiny.model_copy(update={"lora": LoraSettings(rank=4, alpha=8)})


def test_a_fresh_adapter_changes_nothing_and_is_always_the_same(tiny: ModelSettings, adapted: ModelSettings) -> None:
    torch.manual_seed(5)
    one = load_policy(adapted, version(tiny.source))
    state = torch.random.get_rng_state()
    two = load_policy(adapted, version(tiny.source))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(logits(one), logits(load_policy(tiny, version(tiny.source))))
    for (name, ours), (_, others) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(ours, others), name
    assert {name for name, parameter in one.named_parameters() if parameter.requires_grad} == {
        name for name, _ in one.named_parameters() if of_adapter(name)
    }


def test_an_adapter_is_published_loaded_and_swapped(
    tiny: ModelSettings, adapted: ModelSettings, tmp_path: Path
) -> None:
    backbone = load_policy(tiny, version(tiny.source))
    policy = load_policy(adapted, version(tiny.source))
    nudge(policy, of_adapter)
    publish_adapter(str(tmp_path / "1"), policy)
    first = version(tiny.source, 1, tmp_path / "1")
    other = load_policy(adapted, version(tiny.source))
    swap_policy(other, first)
    for model in (other, load_policy(adapted, first)):
        assert torch.equal(logits(model), logits(policy))
        assert not torch.equal(logits(model), logits(backbone))
        with model.disable_adapter():
            assert torch.equal(logits(model), logits(backbone))
    swap_policy(other, version(tiny.source))
    fresh = load_policy(adapted, version(tiny.source))
    for (name, ours), (_, others) in zip(other.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(ours, others), name
    assert json.loads((tmp_path / "1" / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny.source


def test_a_merged_adapter_is_a_plain_model(tiny: ModelSettings, adapted: ModelSettings, tmp_path: Path) -> None:
    policy = load_policy(adapted, version(tiny.source))
    nudge(policy, of_adapter)
    expected = logits(policy)
    publish_weights(str(tmp_path / "merged"), merge_adapter(policy), None)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected)


def test_an_adapter_that_does_not_fit_is_refused(tiny: ModelSettings, adapted: ModelSettings, tmp_path: Path) -> None:
    other_rank = tiny.model_copy(update={"lora": LoraSettings(rank=2)})
    publish_adapter(str(tmp_path / "1"), load_policy(other_rank, version(tiny.source)))
    policy = load_policy(adapted, version(tiny.source))
    nudge(policy, of_adapter)
    before = logits(policy)
    with pytest.raises(TaskError, match=r"/1 cannot be loaded .*rank and target modules"):
        swap_policy(policy, version(tiny.source, 1, tmp_path / "1"))
    with pytest.raises(TaskError, match=r"the backbone here is .*, not elsewhere"):
        swap_policy(policy, version("elsewhere", 1))
    assert torch.equal(logits(policy), before)


@pytest.mark.parametrize("targets", [["nonsense"], ["q_proj", "nonsense"]])
def test_unknown_target_modules_are_named(targets: list[str], tiny: ModelSettings) -> None:
    odd = tiny.model_copy(update={"lora": LoraSettings(target_modules=targets)})
    with pytest.raises(TaskError, match=r"targetModules: nonsense is no layer .*name some of down_proj, .*q_proj"):
        load_policy(odd, version(tiny.source))


def test_a_target_that_can_have_no_adapter_is_refused(tiny: ModelSettings) -> None:
    odd = tiny.model_copy(update={"lora": LoraSettings(target_modules=["input_layernorm"])})
    with pytest.raises(TaskError, match=r"model\.lora\.targetModules does not fit this model: .*is not supported"):
        load_policy(odd, version(tiny.source))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_on_one_of_two_tied_layers_is_refused(target: str, tmp_path: Path, tiny: ModelSettings) -> None:
    odd = tiny.model_copy(update={"lora": LoraSettings(target_modules=["q_proj", target])})
    with pytest.raises(TaskError, match=rf"{target} shares its weight .*lm_head.* are tied"):
        load_policy(odd, version(tiny.source))
    untied = random_model(CONFIGS["qwen2"], tmp_path / "untied")
    own = settings_of(untied, lora=LoraSettings(target_modules=[target]))
    policy = load_policy(own, version(untied))
    nudge(policy, of_adapter)
    expected = logits(policy)
    torch.testing.assert_close(logits(merge_adapter(policy)), expected)


def test_an_adapter_of_another_backbone_is_refused(tmp_path: Path) -> None:
    lora = LoraSettings(rank=2)
    ours, theirs = (random_model(CONFIGS["qwen3"], tmp_path / str(seed), seed) for seed in (0, 1))
    publish_adapter(str(tmp_path / "adapter"), load_policy(settings_of(theirs, lora=lora), version(theirs)))
    policy = load_policy(settings_of(ours, lora=lora), version(ours))
    nudge(policy, of_adapter)
    before = logits(policy)
    for attempt in (
        lambda: swap_policy(policy, version(ours, 1, tmp_path / "adapter")),
        lambda: load_policy(settings_of(ours, lora=lora), version(ours, 1, tmp_path / "adapter")),
    ):
        with pytest.raises(TaskError, match=r"/adapter is an adapter of another backbone .*give model\.source"):
            attempt()
    assert torch.equal(logits(policy), before)
    shards = tmp_path / "copy in shards"
    AutoModelForCausalLM.from_pretrained(theirs).save_pretrained(shards, max_shard_size="10KB")
    load_policy(settings_of(shards, lora=lora), version(shards, 1, tmp_path / "adapter"))


def test_an_adapter_needs_its_settings(tiny: ModelSettings) -> None:
    with pytest.raises(TaskError, match=r"somewhere is given as an adapter, but model\.lora is not set"):
        load_policy(tiny, version(tiny.source, 1, "somewhere"))


# --- the critic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_critic_is_the_policys_body_with_a_head_of_zeros(name: str, tmp_path: Path) -> None:
    folder = random_model(CONFIGS[name], tmp_path / "model")
    critic = load_critic(settings_of(folder), version(folder))
    with torch.no_grad():
        assert torch.equal(critic(TOKENS), torch.zeros(2, 20))
        torch.nn.init.normal_(critic.score.weight)
        body = AutoModelForCausalLM.from_pretrained(folder).base_model
        expected = body(TOKENS).last_hidden_state @ critic.score.weight[0]
        torch.testing.assert_close(critic(TOKENS), expected)
    publish_critic(str(tmp_path / "1"), critic)
    again = load_critic(settings_of(folder), version(tmp_path / "1", 1))
    with torch.no_grad():
        assert torch.equal(again(TOKENS), critic(TOKENS))


def test_a_critic_is_swapped_in_place_whole_or_not_at_all(tiny: ModelSettings, tmp_path: Path) -> None:
    critic, other = (load_critic(tiny, version(tiny.source)) for _ in range(2))
    nudge(critic)
    publish_critic(str(tmp_path / "1"), critic)
    swap_critic(other, version(tmp_path / "1", 1))
    with torch.no_grad():
        values = critic(TOKENS)
        assert torch.equal(other(TOKENS), values)
    with pytest.raises(TaskError, match="give a critic that this job published"):
        swap_critic(other, version(tiny.source))
    with torch.no_grad():
        assert torch.equal(other(TOKENS), values)


def test_a_published_critic_is_a_sequence_classifier_with_one_label(tiny: ModelSettings, tmp_path: Path) -> None:
    critic = load_critic(tiny, version(tiny.source))
    nudge(critic)
    publish_critic(str(tmp_path / "1"), critic)
    tokens = TOKENS.clamp(min=2)  # It scores the last token that is no padding.
    with torch.no_grad():
        score = AutoModelForSequenceClassification.from_pretrained(tmp_path / "1")(tokens).logits
        torch.testing.assert_close(score[:, 0], critic(tokens)[:, -1])


def test_the_head_stays_float32_whatever_the_body_is(tiny: ModelSettings, tmp_path: Path) -> None:
    half = tiny.model_copy(update={"dtype": "bfloat16"})
    critic = load_critic(tiny, version(tiny.source))
    nudge(critic)
    publish_critic(str(tmp_path / "1"), critic, torch.bfloat16)
    loaded: CriticModel = load_critic(half, version(tmp_path / "1", 1))
    assert loaded.body.dtype == torch.bfloat16
    assert torch.equal(loaded.score.weight, critic.score.weight)
    with torch.no_grad():
        assert loaded(TOKENS).dtype == torch.float32
        torch.testing.assert_close(loaded(TOKENS), critic(TOKENS), atol=0.1, rtol=0.1)


# --- tokenizers --------------------------------------------------------------------------------------------------


def resized(tiny_model: Path, folder: Path, vocabulary: int) -> Path:
    config = AutoConfig.from_pretrained(tiny_model)
    config.vocab_size = vocabulary
    random_model(config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder)
    return folder


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = resized(tiny_model, tmp_path / "small", 40)
    with pytest.raises(TaskError, match=r"vocabulary mismatch: .*ids up to 63, .*40 rows; give model\.tokenizer") as it:
        load_tokenizer(settings_of(folder), version(folder))
    assert it.value.reason == "model_unloadable"


def test_a_padded_embedding_is_fine(tiny_model: Path, tmp_path: Path) -> None:
    folder = resized(tiny_model, tmp_path / "large", 128)
    assert len(load_tokenizer(settings_of(folder), version(folder))) == 64


def test_the_tokenizer_may_be_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    folder = random_model(AutoConfig.from_pretrained(tiny_model), tmp_path / "bare")
    with pytest.raises(TaskError, match=r"/bare cannot be loaded .*give model\.tokenizer"):
        load_tokenizer(settings_of(folder), version(folder))
    assert len(load_tokenizer(settings_of(folder, tokenizer=str(tiny_model)), version(folder))) == 64


def test_the_jobs_chat_template_is_used_and_published(tiny: ModelSettings, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    (tmp_path / "chat.jinja").write_text(template)
    for given in (template, str(tmp_path / "chat.jinja")):
        chat = tiny.model_copy(update={"chat_template": given})
        tokenizer = load_tokenizer(chat, version(tiny.source))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) == "1+1="
    publish_weights(str(tmp_path / "1"), load_policy(tiny, version(tiny.source)), tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "1").chat_template == template
    with pytest.raises(TaskError, match=r"nothing\.jinja does not exist"):
        load_tokenizer(tiny.model_copy(update={"chat_template": "nothing.jinja"}), version(tiny.source))
