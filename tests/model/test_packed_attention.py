"""Samples in one row give what the same samples give side by side with padding: numbers and gradients."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, MambaConfig, PreTrainedConfig, PreTrainedModel

from rlhfless_functions.model import packed_attention
from rlhfless_functions.model.forward import body_of, collate, collate_responses, response_log_probs, response_values
from rlhfless_functions.model.packed_attention import can_pack, is_packed, use_packing
from rlhfless_functions.model.shared_prompts import SharedPrompts, can_share_prompts
from rlhfless_functions.weights import CriticModel
from tests.model import varlen_stand_ins
from tests.model.families import CAPPED, EVERY, SIZES, TOKENS, WINDOW

torch.set_num_threads(1)

ALL: dict[str, PreTrainedConfig] = {
    **EVERY,
    "gpt 2, learnt positions": GPT2Config(
        vocab_size=TOKENS + 8, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=None, eos_token_id=1
    ),
}
CPU = torch.device("cpu")

Samples = list[tuple[int, list[int]]]
"""Number of its prompt, and response, of each."""


def build(config: PreTrainedConfig = ALL["qwen3"]) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()


def draw(seed: int, responses: Sequence[int] = (14, 0, 1, 5, 2, 9)) -> tuple[list[list[int]], Samples]:
    """Prompts, one of them longer than the windows are, and responses of these lengths to them."""
    number = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [number.randrange(2, TOKENS) for _ in range(count)]

    prompts = [tokens(length) for length in (WINDOW + 4, 1, 5)]
    return prompts, [(place % 3, tokens(length)) for place, length in enumerate(responses)]


def loss_of(log_probs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
    """A loss in which every token counts differently."""
    assert entropy is not None
    place = torch.arange(log_probs.numel()).view_as(log_probs)
    return (log_probs * place.sin() + entropy * place.cos() * 0.1).sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def passed(
    model: torch.nn.Module, prompts: list[list[int]], samples: Samples, *, packed: bool, share: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of the samples in two passes, and the gradients of a loss on them."""
    use_packing(body_of(model), packed)
    shared = SharedPrompts(body_of(model), prompts, packed=packed) if share else None
    found = []
    for rows in (samples[:4], samples[4:]):
        batch: Any
        responses = [response for _, response in rows]
        if share:
            batch = collate_responses([number for number, _ in rows], responses, 0, packed=packed)
        else:
            batch = collate([prompts[number] for number, _ in rows], responses, 0, packed=packed)
        log_probs, entropy = response_log_probs(model, batch, 0.8, prompts=shared, entropy=True, entropy_gradient=True)
        loss_of(log_probs, entropy).backward()
        found.append(log_probs.detach()[batch.response_mask])
    if shared is not None:
        shared.backward()
    return torch.cat(found), gradients(model)


def compare(model: torch.nn.Module, seed: int = 0, **given: Any) -> None:
    """Packed with and without shared prompts against padded whole samples."""
    prompts, samples = draw(seed, **given)
    expected, slopes = passed(model, prompts, samples, packed=False, share=False)
    assert slopes
    largest = max(float(slope.abs().max()) for slope in slopes.values())
    for share in (False, True):
        numbers, found = passed(model, prompts, samples, packed=True, share=share)
        torch.testing.assert_close(numbers, expected, rtol=1e-4, atol=1e-5)
        assert found.keys() == slopes.keys()
        for name, slope in found.items():
            assert (slope - slopes[name]).abs().max() <= 3e-5 * largest, (name, share)


@pytest.mark.parametrize("name", ALL)
def test_log_probs_and_gradients_are_those_of_padded_samples(name: str) -> None:
    model = build(ALL[name])
    assert can_pack(body_of(model))
    compare(model)


LENGTHS = st.lists(st.integers(0, 20), min_size=5, max_size=9).filter(any)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LENGTHS, st.integers(0, 10_000), st.sampled_from(["qwen3", "gemma 3"]))
def test_whatever_the_lengths_are(responses: list[int], seed: int, name: str) -> None:
    compare(build(ALL[name]), seed, responses=responses)


@pytest.mark.parametrize("kernel", ["torch", "older torch", "flash_attn"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma 3", "phi 3"])
def test_kernels_for_gpus_get_what_they_need_to_compute_the_same(
    monkeypatch: pytest.MonkeyPatch, kernel: str, name: str
) -> None:
    varlen_stand_ins.install(monkeypatch, kernel)
    compare(build(ALL[name]))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["down_proj"]])
def test_an_adapter_learns_the_same(targets: Any) -> None:
    adapted = get_peft_model(build(), LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    assert can_pack(body_of(adapted))
    compare(adapted)


@pytest.mark.parametrize("name", ["qwen3", "gemma 3", "llama 3"])
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    model = build(ALL[name])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
    compare(model)


@pytest.mark.parametrize("share", [False, True])
def test_values_are_those_of_padded_samples(share: bool) -> None:
    torch.manual_seed(0)
    critic = CriticModel(build().base_model)
    torch.nn.init.normal_(critic.score.weight)
    prompts, samples = draw(1)
    numbers, responses = zip(*samples, strict=True)
    padded = response_values(critic, collate([prompts[number] for number in numbers], responses, 0))
    padded.square().sum().backward()
    expected = gradients(critic)
    use_packing(critic.body, True)
    if share:
        shared = SharedPrompts(critic.body, prompts, packed=True)
        values = response_values(critic, collate_responses(numbers, responses, 0, packed=True), shared)
        values.square().sum().backward()
        shared.backward()
    else:
        batch = collate([prompts[number] for number in numbers], responses, 0, packed=True)
        values = response_values(critic, batch)
        values.square().sum().backward()
    torch.testing.assert_close(values, padded, rtol=1e-4, atol=1e-4)
    largest = max(float(slope.abs().max()) for slope in expected.values())
    for name, slope in gradients(critic).items():
        assert (slope - expected[name]).abs().max() <= 3e-5 * largest, name


def test_bfloat16_arithmetic_goes_through() -> None:
    model = build()
    prompts, samples = draw(2)
    expected, _ = passed(model, prompts, samples, packed=False, share=False)
    with torch.autocast("cpu", torch.bfloat16):
        numbers, slopes = passed(model, prompts, samples, packed=True, share=True)
    torch.testing.assert_close(numbers, expected, rtol=0.05, atol=0.2)
    assert {slope.dtype for slope in slopes.values()} == {torch.float32}


def test_the_same_row_gives_the_same_bits() -> None:
    model = build()
    prompts, samples = draw(3)
    (one, slopes), (other, others) = (passed(model, prompts, samples, packed=True, share=True) for _ in range(2))
    assert torch.equal(one, other)
    assert all(torch.equal(slope, others[name]) for name, slope in slopes.items())


def test_a_padded_pass_of_a_packed_model_is_what_it_was() -> None:
    model = build(ALL["gemma 3"])
    ids = torch.tensor([[5 + place % 40 for place in range(3 * WINDOW)]])
    before = model(input_ids=ids).logits
    use_packing(body_of(model), True)
    assert torch.equal(model(input_ids=ids).logits, before)
    use_packing(body_of(model), False)
    assert model.config._attn_implementation == "sdpa"


SMALL = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "eos_token_id", "bos_token_id", "pad_token_id")}


@pytest.mark.parametrize(
    "config",
    [CAPPED, BloomConfig(**SMALL, n_layer=2, n_head=2), MambaConfig(**SMALL, num_hidden_layers=2, state_size=4)],
    ids=["soft-capped attention", "positions in the mask", "no attention"],
)
def test_what_the_kernels_do_not_compute_is_left_alone(config: PreTrainedConfig) -> None:
    body = build(config).base_model
    kernel = body.config._attn_implementation
    assert not can_pack(body)
    assert not is_packed("always", body, CPU, torch.float32)
    assert body.config._attn_implementation == kernel


def test_a_model_that_keeps_the_layout_from_its_attention_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    body = build().base_model
    layer = type(body.layers[0])
    forward = layer.forward

    def forgetful(self: Any, *args: Any, packing: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", forgetful)
    assert not can_pack(body)
    assert body.config._attn_implementation == "sdpa"


def test_a_gpu_that_computes_with_padding_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body, gpu = build().base_model, torch.device("cuda")
    monkeypatch.setattr(packed_attention, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(packed_attention, "installed_kernels", frozenset)
    packed_attention._say.cache_clear()
    for _ in range(2):
        assert not is_packed("auto", body, gpu, torch.bfloat16)
        assert not is_packed("auto", body, gpu, torch.float32)
        assert not is_packed("auto", build(CAPPED).base_model, gpu, torch.bfloat16)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert "Qwen3Model computes with padding" in lines[0] and "install either" in lines[0]
    assert "torch.float32; set model.dtype to bfloat16" in lines[1]
    assert "has no form for packed rows" in lines[2]


def test_packing_is_automatic_where_a_kernel_attends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    body = build().base_model
    assert not is_packed("auto", body, CPU, torch.bfloat16)
    monkeypatch.setattr(packed_attention, "capability_of", lambda device: (9, 0) if device.type == "cuda" else None)
    for installed in ({"torch"}, {"flash_attn"}, set[str]()):
        monkeypatch.setattr(packed_attention, "installed_kernels", lambda installed=installed: frozenset(installed))
        assert is_packed("auto", body, torch.device("cuda"), torch.bfloat16) == bool(installed)
        assert not is_packed("auto", body, torch.device("cuda"), torch.float32)
    assert is_packed("always", body, CPU, torch.float32)
    assert not is_packed("never", body, CPU, torch.float32)
    use_packing(body, True)
    assert can_share_prompts(body)
