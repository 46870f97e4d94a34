"""Adapters: what peft makes of them, published, loaded, swapped and merged."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings, ModelSettings
from rlhfless_functions.weights import load_policy, merge_adapter, publish_adapter, publish_weights, swap_policy
from tests.weights.random_models import CONFIGS, logits, nudge, of_adapter, random_model, settings_of, version
from tests.weights.random_models import tiny as tiny  # A fixture.


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


def test_the_files_of_an_adapter_are_the_same_in_each_process(
    tiny: ModelSettings, adapted: ModelSettings, tmp_path: Path
) -> None:
    """peft keeps the names of modules in a set, whose order differs from process to process."""
    publish_adapter(str(tmp_path), load_policy(adapted, version(tiny.source)))
    names = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert len(names) > 5
    assert names == sorted(names)


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
