"""The language-model head a chunk at a time: the numbers and gradients of the plain formula, in less memory."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import linear
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen3Config,
)

from rlhfless_functions.model import output_head
from rlhfless_functions.model.output_head import check_output_logits, output_logits, token_log_probs

torch.set_num_threads(1)

VOCABULARY, HIDDEN, TOKENS = 50, 16, 11
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
HEADS = {
    "tied": Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "with a bias": PhiConfig(**SMALL),
    "scaled": CohereConfig(**SMALL, logit_scale=0.3),
    "divided": GraniteConfig(**SMALL, logits_scaling=3.0),
    "soft-capped": Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=1.5),
}


def build(name: str = "tied") -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS[name]).eval()
    if (bias := model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    return model


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    return hidden.requires_grad_(), torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def by_the_book(model: PreTrainedModel, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
    """log π over the vocabulary [tokens, V] in float64, with autograd."""
    head, config = model.get_output_embeddings(), model.config
    bias = None if head.bias is None else head.bias.double()
    logits = linear(hidden.double(), head.weight.double(), bias)
    logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return torch.log_softmax(logits / temperature, dim=-1)


@pytest.mark.parametrize("chunk_tokens", [None, 4, 1])
@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_numbers_and_gradients_are_those_of_the_formula(
    name: str, entropy_gradient: bool, chunk_tokens: int | None
) -> None:
    model, temperature = build(name), 0.7
    head = model.get_output_embeddings()
    weights = torch.linspace(-1, 1, TOKENS)
    (hidden, ids), (same_hidden, _) = inputs(), inputs()
    of = [hidden, *head.parameters()]

    every = by_the_book(model, same_hidden, temperature)
    expected = every.gather(1, ids[:, None]).squeeze(1)
    expected_entropy = -(every.exp() * every).sum(-1)
    loss = (expected * weights).sum() + (expected_entropy * weights.square()).sum() * entropy_gradient
    expected_gradients = torch.autograd.grad(loss, [same_hidden, *head.parameters()])

    log_probs, entropy = token_log_probs(
        model, hidden, ids, temperature, entropy=True, entropy_gradient=entropy_gradient, chunk_tokens=chunk_tokens
    )
    assert entropy is not None
    assert entropy.requires_grad == entropy_gradient
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    loss = (log_probs * weights).sum()
    if entropy_gradient:
        loss = loss + (entropy * weights.square()).sum()
    for ours, theirs in zip(torch.autograd.grad(loss, of), expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_has_no_gradient_and_passes_one_on() -> None:
    model = build()
    hidden, ids = inputs()
    log_probs, entropy = token_log_probs(model, hidden, ids, 1.0)
    (expected,) = torch.autograd.grad(log_probs.sum(), hidden)
    model.requires_grad_(False)
    log_probs, entropy = token_log_probs(model, hidden, ids, 1.0)
    (actual,) = torch.autograd.grad(log_probs.sum(), hidden)
    assert entropy is None
    assert torch.equal(actual, expected)


def test_without_tokens_there_is_nothing_and_no_error() -> None:
    model = build()
    hidden, ids = inputs()
    log_probs, entropy = token_log_probs(model, hidden[:0], ids[:0], 1.0, entropy=True)
    assert entropy is not None
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert not model.get_output_embeddings().weight.grad.any()


@pytest.mark.parametrize("chunk_tokens", [2, 5])
def test_nothing_as_wide_as_the_vocabulary_outlives_its_chunk(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    hidden, ids = inputs()
    made = []
    scores = output_head._scores
    monkeypatch.setattr(output_head, "_scores", lambda *given: made.append(result := scores(*given)) or result)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        log_probs, _ = token_log_probs(model, hidden, ids, 1.0, entropy=True, chunk_tokens=chunk_tokens)
    assert {tensor.shape for tensor in saved} == {hidden.shape, ids.shape, (VOCABULARY, HIDDEN)}
    chunks = -(-TOKENS // chunk_tokens)
    assert len(made) == chunks
    assert all(len(chunk) <= chunk_tokens for chunk in made)
    log_probs.sum().backward()
    assert len(made) == 2 * chunks, "the backward pass makes them again"


def test_logits_of_a_bfloat16_model_are_float32_from_the_head_on() -> None:
    model = build().to(torch.bfloat16)
    hidden = (inputs()[0].detach() * 10).to(torch.bfloat16).requires_grad_()
    ids = inputs()[1]
    exact = by_the_book(model, hidden, 1.0).gather(1, ids[:, None]).squeeze(1)
    narrow = torch.log_softmax(model.lm_head(hidden), dim=-1).gather(1, ids[:, None]).squeeze(1)
    with torch.autocast("cpu", torch.bfloat16):
        ours, _ = token_log_probs(model, hidden, ids, 1.0)
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() < 1e-4
    assert (narrow - exact).abs().max() > 0.05
    ours.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == model.lm_head.weight.grad.dtype == torch.bfloat16


def with_adapter_on_head() -> Any:
    adapted = get_peft_model(build(), LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    return adapted


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_an_adapter_on_the_head_counts(chunk_tokens: int | None) -> None:
    adapted = with_adapter_on_head()
    check_output_logits(adapted)
    hidden, ids = inputs()
    log_probs, entropy = token_log_probs(
        adapted, hidden, ids, 0.7, entropy=True, entropy_gradient=True, chunk_tokens=chunk_tokens
    )
    every = torch.log_softmax(adapted.get_base_model().lm_head(hidden) / 0.7, dim=-1)
    torch.testing.assert_close(log_probs, every.gather(1, ids[:, None]).squeeze(1))
    assert entropy is not None
    torch.testing.assert_close(entropy, -(every.exp() * every).sum(-1))
    learning = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    loss, expected = log_probs.sum() + entropy.sum(), every.gather(1, ids[:, None]).sum() - (every.exp() * every).sum()
    for ours, theirs in zip(torch.autograd.grad(loss, learning), torch.autograd.grad(expected, learning), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_the_logits_are_the_model_s_own(name: str) -> None:
    model = build(name)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        ours = output_logits(model, model.base_model(input_ids=ids).last_hidden_state)
        torch.testing.assert_close(ours, model(input_ids=ids).logits)


@pytest.mark.parametrize("change", [lambda logits: logits + 1, lambda logits: logits * 2])
def test_an_architecture_with_logits_of_its_own_kind_is_refused(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    model = build()
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0  # as a padding token's may be
    check_output_logits(model)
    forward = model.forward

    def odd(**arguments: Any) -> Any:
        output = forward(**arguments)
        output.logits = change(output.logits)
        return output

    monkeypatch.setattr(model, "forward", odd)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM changes its logits"):
        check_output_logits(model)
