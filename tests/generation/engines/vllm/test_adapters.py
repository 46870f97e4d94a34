"""Adapters on vLLM: one backbone, and the adapters of versions and of jobs in turn, never mixed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings, ModelSettings
from tests.generation.engines.shares import (
    SAMPLING,
    assert_same,
    generate,
    long_prompt,
    published_adapter,
    save_model,
    settings_of,
    share,
    version,
)
from tests.generation.engines.shares import folder as folder  # A fixture.

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from rlhfless_functions.generation.engines.vllm.engine import VllmEngine

torch.set_num_threads(1)


def test_the_next_version_of_an_adapter_takes_the_place_of_the_last(folder: Path, tmp_path: Path) -> None:
    """With long prompts, whose prefixes are kept: those of one version are not another's."""
    model = settings_of(folder, lora=LoraSettings(rank=4))
    published = str(published_adapter(folder, tmp_path / "adapter"))
    tasks = [SequenceTask(prompt, 0, long_prompt(prompt, 100), seed=prompt) for prompt in range(4)]
    engine, reference = VllmEngine(), TransformersEngine()
    wanted = {}
    for named in (None, published):
        reference.load(model, version(folder, 0, named))
        wanted[named] = generate(reference, tasks)
    for number, named in enumerate([None, published, None, published]):
        engine.load(model, version(folder, number, named))
        assert_same(generate(engine, tasks), wanted[named])
    with pytest.raises(TaskError, match="vLLM never finds keys and values of the adapter before; write recompute"):
        engine.start(tasks, SAMPLING, None, keep_kv_cache=True)
    assert_same(generate(engine, tasks), wanted[published])


@pytest.fixture
def two_jobs(folder: Path, tmp_path: Path) -> list[tuple[ModelSettings, WeightsReference]]:
    """An adapter of each, of different ranks on one backbone."""
    return [
        (
            settings_of(folder, lora=LoraSettings(rank=rank)),
            version(folder, 1, str(published_adapter(folder, tmp_path / f"job-{rank}", rank))),
        )
        for rank in (4, 6)
    ]


def test_an_engine_that_serves_two_jobs_in_turn_never_mixes_them_and_loads_the_backbone_once(
    folder: Path, two_jobs: list[tuple[ModelSettings, WeightsReference]]
) -> None:
    """With long prompts, whose prefixes are kept, and both with the other's."""
    tasks = [SequenceTask(prompt, 0, long_prompt(prompt, 100), seed=prompt) for prompt in range(4)]
    alone = []
    for model, weights in two_jobs:
        engine = VllmEngine()
        engine.load(model, weights)
        alone.append(generate(engine, tasks))
        reference = TransformersEngine()
        reference.load(model, weights)
        assert_same(alone[-1], generate(reference, tasks))
        engine.close()
    assert alone[0] != alone[1]
    shared = VllmEngine()
    shared.load(*two_jobs[0])
    assert shared._loaded is not None
    backbone = shared._loaded.engine
    for number in (0, 1, 1, 0, 1):
        shared.load(*two_jobs[number])
        assert_same(generate(shared, tasks), alone[number])
        assert shared._loaded.engine is backbone
    # One that there is no room for is given an engine of its own.
    shared.load(settings_of(folder, lora=LoraSettings(rank=16)), version(folder))
    assert shared._loaded.engine is not backbone
    assert generate(shared, share(1, 1))


def test_requests_with_and_without_an_adapter_do_not_mix_in_one_batch(
    folder: Path, two_jobs: list[tuple[ModelSettings, WeightsReference]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many slots as adapters, vLLM may give a request of the backbone alone one of them."""
    model, weights = two_jobs[0]
    engine = VllmEngine()
    wanted = []
    for each in (version(folder), weights):
        engine.load(model, each)
        wanted.append(generate(engine, share(8, 2)))
    assert engine._loaded is not None
    real = engine._loaded.engine.add_request

    def half(key: str, tokens: Any, parameters: Any, lora_request: Any) -> Any:
        return real(key, tokens, parameters, lora_request=lora_request if key.endswith("/1") else None)

    monkeypatch.setattr(engine._loaded.engine, "add_request", half)
    mixed = generate(engine, share(8, 2))
    assert_same(mixed, {(prompt, index): wanted[index][prompt, index] for prompt, index in mixed})


def test_an_adapter_of_another_backbone_or_rank_is_refused(folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", folder, seed=7, max_position_embeddings=1024)
    model = settings_of(folder, lora=LoraSettings(rank=4))
    engine = VllmEngine()
    with pytest.raises(TaskError, match="is an adapter of another backbone"):
        engine.load(model, version(folder, 1, str(published_adapter(other, tmp_path / "foreign"))))
    with pytest.raises(TaskError, match=r"large cannot be loaded .* give an adapter of the job's own model, rank"):
        engine.load(model, version(folder, 1, str(published_adapter(folder, tmp_path / "large", rank=32))))
    with pytest.raises(TaskError, match=r"model.lora.rank \(1000\) is more than vLLM's 512"):
        engine.load(settings_of(folder, lora=LoraSettings(rank=1000)), version(folder))
    with pytest.raises(TaskError, match=r"model.lora is not set"):
        engine.load(settings_of(folder), version(folder, 1, str(tmp_path / "large")))
    engine.load(model, version(folder))
    assert generate(engine, share(1, 1))
