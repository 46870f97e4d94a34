"""Small models, shares of samples on them, and what a share's samples must be: for the tests of all engines."""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.engines.base import Engine, EngineRun, SequenceResult, SequenceTask
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.settings import LoraSettings, ModelSettings, SamplingSettings
from rlhfless_functions.weights import load_policy, publish_adapter

SAMPLING = SamplingSettings(max_prompt_tokens=64, max_response_tokens=24)

NewEngine = Callable[[], Engine]

Results = dict[tuple[int, int], SequenceResult]


def save_model(folder: Path, tokenizer_from: Path, kind: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """A random model whose distributions really depend on the context."""
    shape = {
        "vocab_size": 66,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.25,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    } | changes
    torch.manual_seed(seed)
    model = MistralForCausalLM(MistralConfig(**shape)) if kind == "mistral" else Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A model with positions for prompts that are prefilled in chunks, or kept in blocks."""
    return save_model(tmp_path_factory.mktemp("engine-model"), tiny_model, max_position_embeddings=1024)


def settings_of(folder: Path, **changes: Any) -> ModelSettings:
    return ModelSettings(source=str(folder), dtype="float32", **changes)


def version(folder: Path, number: int = 0, adapter: str | None = None) -> WeightsReference:
    return WeightsReference(version=number, uri=str(folder), adapter=adapter)


def prompt_tokens(prompt: int) -> list[int]:
    """Prompts of one to forty tokens."""
    numbers = random.Random(prompt)
    return [numbers.randrange(2, 66) for _ in range([1, 2, 7, 31, 32, 33, 34, 40][prompt % 8])]


def share(prompts: int, samples: int, seed: int = 0) -> list[SequenceTask]:
    return [
        SequenceTask(prompt, index, prompt_tokens(prompt), sample_seed(seed, "training", 1, prompt, index))
        for prompt in range(prompts)
        for index in range(samples)
    ]


def finish(run: EngineRun) -> list[SequenceResult]:
    results = []
    while run.running or run.waiting:
        results += run.step()
    return results


def generate(
    engine: Engine,
    tasks: Sequence[SequenceTask],
    sampling: SamplingSettings = SAMPLING,
    budget: int | None = None,
) -> Results:
    results = finish(engine.start(tasks, sampling, budget))
    assert len(results) == len(tasks)
    return {(result.prompt, result.index): result for result in results}


def continued(tasks: Sequence[SequenceTask], partials: Sequence[SequenceResult]) -> list[SequenceTask]:
    by_key = {(partial.prompt, partial.index): partial for partial in partials}
    return [
        replace(task, response_tokens=partial.response_tokens, log_probs=partial.log_probs)
        if (partial := by_key.get((task.prompt, task.index)))
        else task
        for task in tasks
    ]


def assert_same(given: Results, wanted: Results) -> None:
    """The same tokens and ends, and log-probabilities up to an engine's own arithmetic in float32."""
    assert given.keys() == wanted.keys()
    for key, result in given.items():
        assert result.response_tokens == wanted[key].response_tokens, key
        assert result.finish_reason == wanted[key].finish_reason, key
        assert result.log_probs == pytest.approx(wanted[key].log_probs, abs=2e-4), key


def reference_log_probs(folder: Path, task: SequenceTask, response: Sequence[int], temperature: float) -> list[float]:
    """One plain forward pass in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([[*task.prompt_tokens, *response]])).logits[0]
    start = len(task.prompt_tokens) - 1
    log_probs = torch.log_softmax(logits[start : start + len(response)] / temperature, -1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def log_probs_with_kept_keys(
    passes: Sequence[tuple[Path, int]], task: SequenceTask, response: Sequence[int]
) -> list[float]:
    """Of each response token, by plain transformers in float64, where several models have computed keys and values.

    Args:
        passes: each model computes the tokens of the sequence up to a number, over the keys and values of those before.
    """
    tokens, logits, cache, begin = [*task.prompt_tokens, *response], [], DynamicCache(), 0
    for folder, end in passes:
        if end > begin:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
            with torch.no_grad():
                logits.append(model(torch.tensor([tokens[begin:end]]), past_key_values=cache).logits[0])
            begin = end
    start = len(task.prompt_tokens) - 1
    log_probs = torch.log_softmax(torch.cat(logits)[start : start + len(response)], -1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def long_prompt(prompt: int, tokens: int) -> list[int]:
    numbers = random.Random(f"long-{prompt}")
    return [numbers.randrange(2, 66) for _ in range(tokens)]


def published_adapter(folder: Path, to: Path, rank: int = 4) -> Path:
    """A published adapter that does something."""
    model = settings_of(folder, lora=LoraSettings(rank=rank))
    policy = load_policy(model, version(folder))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    publish_adapter(str(to), policy)
    return to
