"""A model's layers: found in every family, read out as transformers would, and cut off without touching the model."""

import pytest
import torch
from transformers import OpenAIGPTConfig, PreTrainedModel

from rlhfless_functions.generation.early_exit.layers import find_layers
from rlhfless_functions.runtime.task import TaskError
from tests.generation.early_exit.models import ALL, deep, model_of

IDS = torch.randint(2, 64, (2, 20), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def whole(model: PreTrainedModel) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_each_layer_is_read_out_as_the_model_reads_its_last(family: str) -> None:
    model = model_of(ALL[family])
    exits = find_layers(model, family)
    assert exits.count == 2
    seen: dict[int, torch.Tensor] = {}
    with exits.watched(lambda layer, hidden: seen.update({layer: exits.logits(hidden)})):
        expected = whole(model)
    torch.testing.assert_close(seen[1], expected)
    # What transformers says of the hidden states, and a model that has no more layers.
    states = model(input_ids=IDS, use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(seen[0], exits.logits(states[1]))
    torch.testing.assert_close(seen[0], whole(exits.until(1)))
    assert not torch.allclose(seen[0], seen[1])
    assert torch.equal(whole(exits.until(2)), expected)
    assert torch.equal(whole(model), expected)


def test_a_shorter_model_has_the_whole_ones_tensors() -> None:
    model = model_of(deep())
    exits = find_layers(model, "deep")
    before = dict(model.named_parameters())
    shorter = dict(exits.until(3).named_parameters())
    assert 0 < len(shorter) < len(before)
    assert all(parameter is before[name] for name, parameter in shorter.items())
    assert dict(model.named_parameters()).keys() == before.keys()
    assert exits.count == 4


def test_nothing_is_watched_afterwards() -> None:
    model = model_of(deep())
    exits = find_layers(model, "deep")
    seen: list[int] = []
    with exits.watched(lambda layer, hidden: seen.append(layer)):
        whole(model)
    whole(model)
    assert seen == [0, 1, 2, 3]


def test_a_model_without_a_final_norm_is_refused_by_name() -> None:
    model = model_of(OpenAIGPTConfig(vocab_size=72, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    with pytest.raises(TaskError, match=r"org/gpt: no final norm can be found in OpenAIGPTLMHeadModel; name a decoder"):
        find_layers(model, "org/gpt")


def test_a_model_without_a_head_or_layers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(deep())
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    with pytest.raises(TaskError, match="org/model: no head can be found in Qwen3ForCausalLM"):
        find_layers(model, "org/model")
    model.config.num_hidden_layers = 7
    with pytest.raises(TaskError, match="org/model: no list of its 7 layers can be found in Qwen3ForCausalLM"):
        find_layers(model, "org/model")
