"""What a model is tried on when it is first loaded: what differs is computed the plain way or refused, by name."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MptConfig, PreTrainedModel, RwkvConfig

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.model.attention_masks import LayerMasks
from rlhfless_functions.model.shared_prompts import can_share_prompts
from rlhfless_functions.model.trial import TRIAL_LENGTHS, check_passes, differs, trial_samples
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings, ModelSettings
from tests.generation.engines.shares import generate, share
from tests.model.families import FAMILIES, SIZES, save


def build(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_shared_prompts_that_differ_are_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    model = build(MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, initializer_range=0.3))
    with caplog.at_level(logging.WARNING):
        assert not can_share_prompts(model.base_model)
        assert not can_share_prompts(model.base_model)
    (said,) = (record.message for record in caplog.records if "MptModel" in record.message)
    assert said == ("MptModel can't share prompts: every sample is computed whole (its numbers would differ)")
    check_passes(model, "m")


def test_shared_prompts_that_fail_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = build(RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))
    assert not can_share_prompts(model.base_model)


def test_a_model_that_mixes_the_samples_of_a_pass_is_refused() -> None:
    model = build(LlamaConfig(**SIZES))

    def mix(module: Any, given: Any, output: Any) -> None:
        output.last_hidden_state += output.last_hidden_state.mean(0, keepdim=True) * (len(output[0]) > 1)

    check_passes(model, "m")
    model.base_model.register_forward_hook(mix)
    with pytest.raises(TaskError, match=r"m: LlamaForCausalLM gives a sample other numbers if a longer one") as caught:
        check_passes(model, "m")
    assert caught.value.reason == "model_unloadable"


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(TaskError, match=r"m: LlamaForCausalLM gives a sample other numbers"):
        check_passes(build(LlamaConfig(**SIZES, is_causal=False)), "m")


def test_an_error_of_the_model_s_own_code_is_a_refusal() -> None:
    model = build(LlamaConfig(**SIZES))

    def fail(module: Any, given: Any) -> None:
        raise KeyError("chunked_attention")

    model.base_model.register_forward_pre_hook(fail)
    with pytest.raises(TaskError, match=r"m: LlamaForCausalLM can't be computed .*KeyError: 'chunked.*another arch"):
        check_passes(model, "m")


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["weights that arrive", "adapter"])
@pytest.mark.parametrize(("weights", "refused"), [(0, True), (1, False)])
def test_an_engine_that_computes_another_model_is_refused_at_the_first_load(
    weights: int,
    refused: bool,
    lora: LoraSettings | None,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save(FAMILIES["qwen3"], tmp_path, tiny_model)
    settings = ModelSettings(source=str(folder), dtype="float32", lora=lora)
    reference = WeightsReference(version=weights, uri=str(folder))
    run(TransformersEngine(), settings, reference)
    monkeypatch.setattr(LayerMasks, "of", lambda config: LayerMasks(frozenset({"full_attention"}), 2))
    engine = TransformersEngine()
    if refused:
        with pytest.raises(TaskError, match=r"other logits than Qwen3For.*set generation\.engine to vllm") as caught:
            run(engine, settings, reference)
        assert caught.value.reason == "model_unloadable"
    else:
        run(engine, settings, reference)  # The job's first weights have been tried.


def run(engine: TransformersEngine, settings: ModelSettings, reference: WeightsReference) -> None:
    engine.load(settings, reference)
    generate(engine, share(2, 1))


def test_samples_come_from_the_whole_vocabulary_and_are_always_the_same() -> None:
    model = build(LlamaConfig(**SIZES))
    samples = trial_samples(model, TRIAL_LENGTHS)
    assert [len(sample) for sample in samples] == list(TRIAL_LENGTHS)
    assert samples == trial_samples(model, TRIAL_LENGTHS)
    assert all(0 <= id < SIZES["vocab_size"] for sample in samples for id in sample)


def test_rounding_is_no_difference_and_nan_is_one() -> None:
    own = torch.randn(4, 8)
    assert not differs(own * (1 + 1e-5), own, torch.float32)
    assert differs(own * 1.01, own, torch.float32)
    assert not differs(own * 1.02, own, torch.bfloat16)
    assert differs(own * 1.5, own, torch.bfloat16)
    assert differs(torch.full_like(own, float("nan")), own, torch.bfloat16)


def test_weights_that_are_not_finite_are_no_fault_of_an_architecture() -> None:
    own = torch.tensor([1.0, float("nan"), float("-inf"), 2.0])
    assert not differs(torch.tensor([1.0, 5.0, 5.0, 2.0]), own, torch.float32)
    assert differs(torch.tensor([1.0, 5.0, 5.0, float("nan")]), own, torch.float32)
    assert not differs(torch.zeros(2), torch.full((2,), float("nan")), torch.float32)
