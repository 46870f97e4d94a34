"""Log-probabilities, entropies and values of ragged batches."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from rlhfless_functions.model.forward import (
    PASS_OVERHEAD_TOKENS,
    collate,
    micro_batches,
    response_log_probs,
    response_values,
)
from rlhfless_functions.weights import CriticModel
from tests.weights.random_models import token_values

torch.set_num_threads(1)

VOCABULARY = 40
PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
RESPONSES = [[20, 21], [22, 23, 24, 25, 26], [], [27]]

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**SMALL),
    "gemma2 (soft-capped logits, sliding window)": lambda: Gemma2Config(
        **SMALL, final_logit_softcapping=0.7, sliding_window=4
    ),
    "cohere (scaled logits)": lambda: CohereConfig(**SMALL, logit_scale=0.3),
    "granite (divided logits)": lambda: GraniteConfig(**SMALL, logits_scaling=3.0),
    "gpt2 (learnt positions)": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=1
    ),
}


def build(architecture: str = "qwen3") -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()).eval()
    with torch.no_grad():  # far enough from uniform for mistakes to show
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def by_the_book(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """log π of the response's tokens from the model's own logits, one sample at a time: [response length, V]."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, dim=-1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_are_those_of_the_model_s_own_logits(architecture: str, temperature: float) -> None:
    model = build(architecture)
    log_probs, entropy = response_log_probs(model, collate(PROMPTS, RESPONSES, 0), temperature, entropy=True)
    assert entropy is not None
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        if not response:
            continue
        expected = by_the_book(model, prompt, response, temperature)
        chosen = expected.gather(1, torch.tensor(response)[:, None]).squeeze(1)
        torch.testing.assert_close(log_probs[row, : len(response)].double(), chosen, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            entropy[row, : len(response)].double(), -(expected.exp() * expected).sum(-1), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_row_alone_equals_the_row_in_a_ragged_batch(architecture: str) -> None:
    model = build(architecture)
    together, _ = response_log_probs(model, collate(PROMPTS, RESPONSES, 0), 1.0)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        alone, _ = response_log_probs(model, collate([prompt], [response], 0), 1.0)
        torch.testing.assert_close(together[row, : len(response)], alone[0], rtol=1e-5, atol=1e-6)


def test_padding_is_zero_and_the_pad_token_has_no_influence() -> None:
    model = build()
    one, entropy = response_log_probs(model, collate(PROMPTS, RESPONSES, 0), 1.0, entropy=True)
    other, _ = response_log_probs(model, collate(PROMPTS, RESPONSES, VOCABULARY - 1), 1.0)
    assert one.shape == (4, 5)
    assert entropy is not None
    assert torch.equal(one, other)
    mask = collate(PROMPTS, RESPONSES, 0).response_mask
    assert mask.sum(-1).tolist() == [len(response) for response in RESPONSES]
    assert not one[~mask].any()
    assert not entropy[~mask].any()


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        collate([[1], []], [[2], [3]], 0)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 8])
def test_chunks_change_neither_the_numbers_nor_the_gradients(chunk_tokens: int) -> None:
    model, batch = build(), collate(PROMPTS, RESPONSES, 0)

    def gradients(chunk: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        log_probs, entropy = response_log_probs(
            model, batch, 0.8, entropy=True, entropy_gradient=True, chunk_tokens=chunk
        )
        assert entropy is not None
        loss = (log_probs * torch.arange(20).view(4, 5)).sum() + entropy.sum()
        return loss, list(torch.autograd.grad(loss, list(model.parameters())))

    expected, expected_gradients = gradients(1000)
    actual, actual_gradients = gradients(chunk_tokens)
    torch.testing.assert_close(actual, expected)
    for mine, plain in zip(actual_gradients, expected_gradients, strict=True):
        assert (mine - plain).abs().max() <= 3e-5 * max(1.0, float(plain.abs().max()))


def test_entropy_has_a_gradient_only_if_asked_for() -> None:
    model, batch = build(), collate(PROMPTS, RESPONSES, 0)
    _, without = response_log_probs(model, batch, 1.0, entropy=True)
    _, with_gradient = response_log_probs(model, batch, 1.0, entropy=True, entropy_gradient=True)
    assert without is not None
    assert with_gradient is not None
    assert not without.requires_grad
    assert with_gradient.requires_grad
    assert torch.equal(without, with_gradient)


def test_an_adapter_counts_and_can_be_taken_off() -> None:
    backbone, batch = build(), collate(PROMPTS, RESPONSES, 0)
    plain, _ = response_log_probs(backbone, batch, 1.0)
    adapted = get_peft_model(build(), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    with_adapter, _ = response_log_probs(adapted, batch, 1.0)
    assert (with_adapter - plain).abs().max() > 1e-3
    with adapted.disable_adapter():
        torch.testing.assert_close(response_log_probs(adapted, batch, 1.0)[0], plain)


def test_values_stand_before_each_token() -> None:
    torch.manual_seed(0)
    critic = CriticModel(build().base_model)
    batch = collate(PROMPTS, RESPONSES, 0)
    assert not response_values(critic, batch).any()
    torch.nn.init.normal_(critic.score.weight)
    values = response_values(critic, batch)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        of_prefixes = token_values(critic, torch.tensor([prompt + response]))[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(values[row, : len(response)], of_prefixes, rtol=1e-5, atol=1e-6)
        assert not values[row, len(response) :].any()


LENGTHS = st.lists(st.integers(1, 300), max_size=40)


@given(LENGTHS, st.integers(1, 2000))
def test_micro_batches_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    runs = micro_batches(lengths, budget)
    assert sorted(index for run in runs for index in run) == list(range(len(lengths)))
    for run in runs:
        assert len(run) == 1 or len(run) * max(lengths[index] for index in run) <= budget
    longest = [max(lengths[index] for index in run) for run in runs]
    assert longest == sorted(longest, reverse=True)


@given(LENGTHS, st.integers(300, 2000), st.integers(1, 6))
def test_no_even_cut_computes_fewer_tokens(lengths: list[int], budget: int, size: int) -> None:
    def cost(runs: list[list[int]]) -> int:
        return sum(len(run) * max(lengths[index] for index in run) + PASS_OVERHEAD_TOKENS for run in runs)

    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    size = min(size, math.floor(budget / 300) or 1)
    even = [order[start : start + size] for start in range(0, len(order), size)]
    assert cost(micro_batches(lengths, budget)) <= cost(even)
