"""A prompt that is computed once for its group gives what passing every sample whole gives."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rlhfless_functions.model.forward import (
    body_of,
    collate,
    collate_responses,
    response_log_probs,
    response_values,
)
from rlhfless_functions.model.shared_prompts import SharedPrompts, can_share_prompts
from rlhfless_functions.weights import CriticModel

torch.set_num_threads(1)

VOCABULARY, WINDOW = 40, 4
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
GEMMA: dict[str, Any] = {**SMALL, "head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "qwen3 with experts": Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    "llama": LlamaConfig(**SMALL),
    "mistral, sliding window": MistralConfig(**SMALL, sliding_window=WINDOW, head_dim=8),
    "gemma2, capped, sliding window": Gemma2Config(**GEMMA, attn_logit_softcapping=0.5, final_logit_softcapping=2.0),
    "gemma3, both kinds of layers": Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"]),
    "gemma3, window that no layer uses": Gemma3TextConfig(**GEMMA, layer_types=["full_attention"] * 2),
    "phi3": Phi3Config(**SMALL),
    "gpt2, learnt positions": GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=2, eos_token_id=1
    ),
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
OF_PROMPT = [0, 2, 0, 1, 2, 0, 1]
RESPONSES = [[20, 21], [22, 23, 24, 25, 26, 27], [], [28], [29, 30, 31], [32, 33, 34, 35], [36, 37]]
RUNS = [[0, 1, 2], [3], [4, 5, 6]]


def build(name: str = "qwen3") -> PreTrainedModel:
    config = ARCHITECTURES[name]
    torch.manual_seed(0)
    eager = {"attn_implementation": "eager"} if "capped" in name else {}
    return AutoModelForCausalLM.from_config(config, **eager).eval()


def whole(rows: Sequence[int]) -> Any:
    return collate([PROMPTS[OF_PROMPT[row]] for row in rows], [RESPONSES[row] for row in rows], 0)


def responses(rows: Sequence[int]) -> Any:
    return collate_responses([OF_PROMPT[row] for row in rows], [RESPONSES[row] for row in rows], 0)


def weighed(log_probs: torch.Tensor, entropy: torch.Tensor | None, rows: Sequence[int]) -> torch.Tensor:
    """A loss in which every token counts differently."""
    assert entropy is not None
    place = torch.tensor(rows)[:, None] + torch.arange(log_probs.shape[1])
    return (log_probs * place.sin() + entropy * place.cos() * 0.1).sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def assert_close(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert others
    largest = max(float(gradient.abs().max()) for gradient in others.values())
    for name, gradient in some.items():
        assert (gradient - others[name]).abs().max() <= 1e-5 * largest, name


def compare(model: torch.nn.Module) -> None:
    """Numbers and gradients, whole samples in one pass against responses in three."""
    for rows in RUNS:
        log_probs, entropy = response_log_probs(model, whole(rows), 0.8, entropy=True, entropy_gradient=True)
        weighed(log_probs, entropy, rows).backward()
    expected = gradients(model)
    prompts = SharedPrompts(body_of(model), PROMPTS)
    for rows in RUNS:
        plain, _ = response_log_probs(model, whole(rows), 0.8)
        log_probs, entropy = response_log_probs(
            model, responses(rows), 0.8, prompts=prompts, entropy=True, entropy_gradient=True
        )
        torch.testing.assert_close(log_probs, plain, rtol=1e-5, atol=1e-5)
        weighed(log_probs, entropy, rows).backward()
    prompts.backward()
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_and_gradients_are_those_of_whole_samples(name: str) -> None:
    model = build(name)
    assert can_share_prompts(body_of(model))
    compare(model)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["down_proj"]])
def test_an_adapter_learns_the_same(targets: Any) -> None:
    adapted = get_peft_model(build(), LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    compare(adapted)


@pytest.mark.parametrize("name", ["qwen3", "gemma3, both kinds of layers"])
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    model = build(name)
    plain = build(name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
    compare(model)
    found = []
    for each in (model, plain):
        prompts = SharedPrompts(body_of(each), PROMPTS)
        log_probs, _ = response_log_probs(each, responses(RUNS[2]), 1.0, prompts=prompts)
        log_probs.sum().backward()
        prompts.backward()
        found.append(gradients(each))
    assert_close(*found)


def test_values_are_those_of_whole_samples() -> None:
    torch.manual_seed(0)
    critic = CriticModel(build().base_model)
    torch.nn.init.normal_(critic.score.weight)
    rows = RUNS[0]
    response_values(critic, whole(rows)).square().sum().backward()
    expected = gradients(critic)
    prompts = SharedPrompts(body_of(critic), PROMPTS)
    values = response_values(critic, responses(rows), prompts)
    torch.testing.assert_close(values, response_values(critic, whole(rows)), rtol=1e-5, atol=1e-5)
    values.square().sum().backward()
    prompts.backward()
    assert_close(gradients(critic), expected)


def test_without_gradients_it_is_a_matter_of_numbers_alone() -> None:
    model = build()
    with torch.inference_mode():
        prompts = SharedPrompts(body_of(model), PROMPTS)
        shared, _ = response_log_probs(model, responses(RUNS[0]), 1.0, prompts=prompts)
        plain, _ = response_log_probs(model, whole(RUNS[0]), 1.0)
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [[2], [3], [2, 3]])
def test_responses_of_one_token_or_none_need_no_pass_of_their_own(rows: list[int]) -> None:
    model = build()
    prompts = SharedPrompts(body_of(model), PROMPTS)
    shared, _ = response_log_probs(model, responses(rows), 1.0, prompts=prompts)
    plain, _ = response_log_probs(model, whole(rows), 1.0)
    torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-5)
    shared.sum().backward()
    prompts.backward()
    assert (rows == [2]) == (not any(gradient.any() for gradient in gradients(model).values()))


def test_a_prompt_s_numbers_do_not_depend_on_the_others_and_the_pad_token_does_not_count() -> None:
    model = build()
    rows = [0, 5]
    alone = SharedPrompts(body_of(model), PROMPTS[:1])
    together = SharedPrompts(body_of(model), [*PROMPTS, [30] * 20])
    one, _ = response_log_probs(model, responses(rows), 1.0, prompts=alone)
    other, _ = response_log_probs(model, responses(rows), 1.0, prompts=together)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_bfloat16_arithmetic_goes_through() -> None:
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        prompts = SharedPrompts(body_of(model), PROMPTS)
        shared, _ = response_log_probs(model, responses(RUNS[1]), 1.0, prompts=prompts)
    plain, _ = response_log_probs(model, whole(RUNS[1]), 1.0)
    torch.testing.assert_close(shared, plain, rtol=0.05, atol=0.1)
    shared.sum().backward()
    prompts.backward()
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}


def test_other_attention_is_left_alone() -> None:
    body = build().base_model
    body.config._attn_implementation = "flash_attention_2"
    assert not can_share_prompts(body)
    body.config._attn_implementation = "sdpa"
    body.config.layer_types = ["linear_attention", "full_attention"]
    assert not can_share_prompts(body)
