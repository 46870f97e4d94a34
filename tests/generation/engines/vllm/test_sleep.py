"""vLLM's sleep as the engine uses it: what is asked for in which order, and what it samples after it.

vLLM sleeps on a GPU alone. On a CPU its engine, scheduler and executor do all that they do there, and so does a worker
whose memory forgets what a GPU's would.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.engines.base import NonFiniteLogitsError, SequenceTask
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSettings, LoraSettings, ModelSettings
from tests.generation.engines.shares import (
    SAMPLING,
    assert_same,
    finish,
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

from rlhfless_functions.generation.engines.vllm import sleep as vllm_sleep
from rlhfless_functions.generation.engines.vllm.arguments import engine_arguments
from rlhfless_functions.generation.engines.vllm.engine import VllmEngine
from rlhfless_functions.generation.engines.vllm.worker import WorkerExtension
from rlhfless_functions.weights.source import read_config

torch.set_num_threads(1)

ROOMY = EngineSettings(kv_budget_tokens=8192, sequence_tokens=1024, sleeps=True)
LONG = [SequenceTask(prompt, 0, long_prompt(prompt, 100), seed=prompt) for prompt in range(4)]
"""Prompts whose prefixes are kept in blocks."""


class ForgetfulWorker:
    """A CPU worker's memory made to behave as a GPU's under vLLM's allocator, and what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.cpu_worker import CPUWorker

        self.asked: list[str] = []
        self._kept: dict[str, torch.Tensor] = {}
        replace = WorkerExtension.replace_weights

        def replace_weights(worker: Any, files: list[str], tied: bool) -> None:
            self.asked.append("replace weights")
            replace(worker, files, tied)

        monkeypatch.setattr(CPUWorker, "sleep", lambda worker, level=1: self._sleep(worker.model_runner, level))
        monkeypatch.setattr(CPUWorker, "wake_up", lambda worker, tags=None: self._wake(worker.model_runner, tags))
        monkeypatch.setattr(WorkerExtension, "replace_weights", replace_weights)

    def _sleep(self, runner: Any, level: int) -> None:
        self.asked.append(f"sleep at level {level}")
        parameters = dict(runner.get_model().named_parameters())
        self._kept = {name: each.detach().clone() for name, each in parameters.items()} if level == 1 else {}
        for memory in (*parameters.values(), *runner.kv_caches):
            memory.data.fill_(torch.nan)

    def _wake(self, runner: Any, tags: list[str] | None) -> None:
        self.asked.append(f"wake {' and '.join(tags or ['everything'])}")
        if tags is None or "kv_cache" in tags:
            for cache in runner.kv_caches:
                cache.fill_(1000.0)  # what somebody else has left there
        for name, parameter in runner.get_model().named_parameters():
            if name in self._kept:
                parameter.data.copy_(self._kept[name])


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("later"), folder, seed=7, max_position_embeddings=1024)


def started(model: ModelSettings, weights: WeightsReference, engine: VllmEngine | None = None) -> VllmEngine:
    """An engine that sleeps: what vLLM refuses to be asked for on a CPU is said of it afterwards."""
    if VllmEngine._resident is not None:
        VllmEngine._resident.close()
    engine = engine or VllmEngine(ROOMY)
    engine.load(model, weights)
    held_by(engine).vllm_config.model_config.enable_sleep_mode = True
    return engine


@pytest.fixture(scope="module")
def kept() -> Iterator[VllmEngine]:
    """One for all tests that need no fresh one: vLLM takes a while to start."""
    engine = VllmEngine(ROOMY)
    yield engine
    engine.close()


def held_by(engine: VllmEngine) -> Any:
    """vLLM's own engine."""
    assert engine._loaded is not None
    return engine._loaded.engine


@pytest.fixture
def engine(kept: VllmEngine, folder: Path, worker: ForgetfulWorker) -> VllmEngine:
    """All weights are trained."""
    if kept._loaded is None:
        started(settings_of(folder), version(folder), kept)
    kept.load(settings_of(folder), version(folder))
    worker.asked.clear()
    return kept


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ForgetfulWorker:
    return ForgetfulWorker(monkeypatch)


def reference(folder: Path, tasks: list[SequenceTask], adapter: Path | None = None) -> Any:
    """What the other engine samples."""
    other = TransformersEngine()
    model = settings_of(folder) if adapter is None else settings_of(folder, lora=LoraSettings(rank=4))
    other.load(model, version(folder, 0, str(adapter) if adapter is not None else None))
    return generate(other, tasks)


def test_weights_are_forgotten_and_there_again_before_the_cache_takes_the_room(
    engine: VllmEngine, worker: ForgetfulWorker, folder: Path
) -> None:
    before = generate(engine, LONG)
    engine.sleep()
    assert worker.asked == ["sleep at level 2"]
    assert held_by(engine).is_sleeping()
    engine.load(settings_of(folder), version(folder))
    assert worker.asked[1:] == ["wake weights", "replace weights", "wake kv_cache"]
    run = engine.start(LONG, SAMPLING, None)
    assert {(each.prompt, each.index): each for each in finish(run)} == before
    assert run.computed.prompt == 400, "no prefix outlives its keys and values"


def test_the_stand_in_for_a_gpus_memory_really_forgets(engine: VllmEngine, folder: Path) -> None:
    engine.sleep()
    vllm_sleep.wake(held_by(engine))
    engine._usable = True
    with pytest.raises(NonFiniteLogitsError):
        generate(engine, share(2, 1))
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, LONG), reference(folder, LONG))


def test_the_next_version_comes_into_memory_that_was_asleep(engine: VllmEngine, folder: Path, later: Path) -> None:
    for weights in (version(later, 1), version(folder, 2), version(later, 3)):
        engine.sleep()
        engine.load(settings_of(folder), weights)
        assert_same(generate(engine, LONG), reference(Path(weights.uri), LONG))


def test_to_sleep_twice_is_to_sleep_once(engine: VllmEngine, worker: ForgetfulWorker, folder: Path) -> None:
    engine.sleep()
    engine.sleep()
    assert worker.asked == ["sleep at level 2"]
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(LONG, SAMPLING, None)


def test_a_run_that_is_abandoned_leaves_nothing_to_the_one_after_the_sleep(engine: VllmEngine, folder: Path) -> None:
    run = engine.start(share(8, 2), SAMPLING, None)
    for _ in range(5):
        run.step()
    engine.sleep()
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, LONG), reference(folder, LONG))


def test_weights_that_do_not_fit_are_refused_while_it_sleeps_on(
    engine: VllmEngine, worker: ForgetfulWorker, folder: Path, tmp_path: Path, tiny_model: Path
) -> None:
    other = save_model(tmp_path, tiny_model, num_hidden_layers=3, max_position_embeddings=1024)
    engine.sleep()
    with pytest.raises(TaskError) as caught:
        engine.load(settings_of(folder), version(other, 1))
    assert caught.value.reason == "model_unloadable"
    assert worker.asked == ["sleep at level 2"]
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, LONG), reference(folder, LONG))


def test_another_model_is_for_another_process(engine: VllmEngine, later: Path) -> None:
    """vLLM's allocator serves one engine a process."""
    with pytest.raises(TaskError, match="this instance ends") as caught:
        engine.load(settings_of(later), version(later))
    assert caught.value.reason == "engine_lost"
    assert caught.value.retryable


def test_with_an_adapter_the_weights_are_kept_and_the_adapter_comes_anew(
    worker: ForgetfulWorker, folder: Path, tmp_path: Path
) -> None:
    model = settings_of(folder, lora=LoraSettings(rank=4))
    adapter = published_adapter(folder, tmp_path / "adapter")
    engine = started(model, version(folder, 1, str(adapter)))
    adapted, plain = reference(folder, LONG, adapter), reference(folder, LONG)
    assert adapted != plain
    for number, (named, wanted) in enumerate([(adapter, adapted), (adapter, adapted), (None, plain)]):
        engine.sleep()
        engine.load(model, version(folder, number, str(named) if named else None))
        assert_same(generate(engine, LONG), wanted)
    assert worker.asked == ["sleep at level 1", "wake everything"] * 3
    engine.close()


@pytest.mark.parametrize("failing", ["wake weights", "replace weights", "wake kv_cache"])
def test_an_engine_that_does_not_wake_up_is_lost(
    worker: ForgetfulWorker, folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    engine = started(settings_of(folder), version(folder))
    engine.sleep()

    class Failing(list[str]):
        def append(self, asked: str) -> None:
            if asked == failing:
                raise RuntimeError("CUDA error: out of memory")

    worker.asked = Failing()
    with pytest.raises(TaskError, match="out of memory") as caught:
        engine.load(settings_of(folder), version(folder))
    assert (caught.value.reason, caught.value.retryable) == ("engine_lost", True)
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(LONG, SAMPLING, None)


def test_on_a_cpu_a_sleep_ends_vllm_and_the_next_load_starts_it(folder: Path) -> None:
    if VllmEngine._resident is not None:
        VllmEngine._resident.close()
    engine = VllmEngine(ROOMY)
    engine.load(settings_of(folder), version(folder))
    before = generate(engine, LONG)
    engine.sleep()
    assert VllmEngine._resident is None
    engine.load(settings_of(folder), version(folder))
    assert generate(engine, LONG) == before
    engine.close()


def test_prefixes_that_instances_share_are_no_obstacle_to_sleep(worker: ForgetfulWorker, folder: Path) -> None:
    engine = VllmEngine(ROOMY.model_copy(update={"share_prefixes": True}))
    started(settings_of(folder), version(folder), engine)
    engine.sleep()
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, LONG), reference(folder, LONG))
    engine.close()


def test_on_a_gpu_where_vllm_cannot_sleep_the_memory_comes_back_with_the_end_of_the_instance(folder: Path) -> None:
    if VllmEngine._resident is not None:
        VllmEngine._resident.close()
    engine = VllmEngine(ROOMY)
    engine.load(settings_of(folder), version(folder))
    engine._device = torch.device("cuda")
    with pytest.raises(TaskError, match="started without `sleeps`") as caught:
        engine.sleep()
    assert (caught.value.reason, caught.value.retryable) == ("engine_lost", True)
    assert VllmEngine._resident is None


@pytest.mark.parametrize(
    ("device", "asked", "sleeps"), [("cuda", True, True), ("cuda", False, None), ("cpu", True, None)]
)
def test_vllm_is_started_to_sleep_on_a_gpu_whose_memory_it_has_to_give_back(
    folder: Path, device: str, asked: bool, sleeps: bool | None
) -> None:
    config = read_config(folder, str(folder))
    settings = EngineSettings(sleeps=asked)
    arguments = engine_arguments(folder, config, settings_of(folder), settings, torch.device(device), frozenset())
    assert arguments.get("enable_sleep_mode") is sleeps
