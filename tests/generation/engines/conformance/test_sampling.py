"""Tokens and log-probabilities are those of the model's own distribution, and of the seed alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhfless_functions.generation.engines.base import Engine
from rlhfless_functions.generation.engines.choice import EngineChoice, make_engine
from rlhfless_functions.settings import EngineSampling, EngineSettings, ModelSettings
from tests.generation.engines.shares import (
    SAMPLING,
    NewEngine,
    assert_same,
    continued,
    generate,
    reference_log_probs,
    save_model,
    settings_of,
    share,
    version,
)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_tempered_distribution(engine: Engine, folder: Path, temperature: float) -> None:
    tasks = share(8, 2)
    sampling = SAMPLING.model_copy(update={"temperature": temperature})
    results = generate(engine, tasks, sampling)
    for task in tasks[::3]:
        result = results[task.prompt, task.index]
        expected = reference_log_probs(folder, task, result.response_tokens, temperature)
        assert result.log_probs == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ],
)
def test_attention_of_every_kind_is_the_models_own(
    new_engine: NewEngine, tmp_path: Path, tiny_model: Path, kind: str, changes: dict[str, Any]
) -> None:
    folder = save_model(tmp_path, tiny_model, kind, **changes)
    engine = new_engine()
    engine.load(settings_of(folder), version(folder))
    tasks = share(8, 1)
    results = generate(engine, tasks)
    for task in tasks:
        result = results[task.prompt, task.index]
        expected = reference_log_probs(folder, task, result.response_tokens, 1.0)
        assert result.log_probs == pytest.approx(expected, abs=2e-5)


def test_a_bfloat16_model_gives_log_probs_near_the_exact_ones(new_engine: NewEngine, folder: Path) -> None:
    engine = new_engine()
    engine.load(ModelSettings(source=str(folder), dtype="bfloat16"), version(folder))
    tasks = share(8, 1)
    results = generate(engine, tasks)
    differences = []
    for task in tasks:
        result = results[task.prompt, task.index]
        expected = reference_log_probs(folder, task, result.response_tokens, 1.0)
        differences += [abs(a - b) for a, b in zip(result.log_probs, expected, strict=True)]
    assert sum(differences) / len(differences) < 0.05


def test_samples_of_a_group_differ_and_seeds_matter(engine: Engine) -> None:
    first = generate(engine, share(1, 8))
    assert len({tuple(result.response_tokens) for result in first.values()}) == 8
    other = generate(engine, share(1, 8, seed=1))
    assert first[0, 0].response_tokens != other[0, 0].response_tokens


@pytest.mark.parametrize("prompts", [[0, 3, 7]])
def test_at_a_low_temperature_the_likeliest_token_is_taken(engine: Engine, folder: Path, prompts: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tasks = [task for task in share(8, 1) if task.prompt in prompts]
    results = generate(engine, tasks, SAMPLING.model_copy(update={"temperature": 0.01}))
    for task in tasks:
        greedy = model.generate(
            torch.tensor([list(task.prompt_tokens)]), do_sample=False, max_new_tokens=SAMPLING.max_response_tokens
        )
        assert results[task.prompt, task.index].response_tokens == greedy[0, len(task.prompt_tokens) :].tolist()


def test_at_temperature_zero_the_likeliest_tokens_come_with_their_own_log_probs(engine: Engine, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tasks = share(8, 1)
    sampling = EngineSampling(max_prompt_tokens=64, max_response_tokens=SAMPLING.max_response_tokens, temperature=0)
    results = generate(engine, tasks, sampling)
    for task in tasks:
        result = results[task.prompt, task.index]
        greedy = model.generate(
            torch.tensor([list(task.prompt_tokens)]), do_sample=False, max_new_tokens=SAMPLING.max_response_tokens
        )
        assert result.response_tokens == greedy[0, len(task.prompt_tokens) :].tolist()
        expected = reference_log_probs(folder, task, result.response_tokens, 1.0)
        assert result.log_probs == pytest.approx(expected, abs=2e-5)
    # The same where another instance goes on.
    run = engine.start(tasks, sampling, None)
    done = {(r.prompt, r.index): r for _ in range(5) for r in run.step()}
    rest = continued([task for task in tasks if (task.prompt, task.index) not in done], run.unfinished())
    assert_same(done | generate(engine, rest, sampling), results)


def test_every_engine_samples_the_same_tokens_from_the_same_seeds(engine: Engine, folder: Path) -> None:
    reference = make_engine(EngineChoice("transformers", "the test says so"), EngineSettings())
    reference.load(settings_of(folder), version(folder))
    assert_same(generate(engine, share(8, 4)), generate(reference, share(8, 4)))
