"""The engine on transformers: what it promises beyond what every engine does."""

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import BloomConfig, BloomForCausalLM

from rlhfless_functions import weights as stored
from rlhfless_functions.api import EngineRoom, WeightsReference
from rlhfless_functions.generation.engines.base import Engine, SequenceResult
from rlhfless_functions.generation.engines.kv_cache import padded
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.weights import PrefetchedWeights, load_policy, load_tokenizer, publish_weights, take_over
from tests.generation.engines.shares import (
    SAMPLING,
    continued,
    finish,
    generate,
    prompt_tokens,
    reference_log_probs,
    save_model,
    settings_of,
    share,
    version,
)

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("engine-model"), tiny_model)


@pytest.fixture
def new_engine() -> Callable[[], Engine]:
    return TransformersEngine


@pytest.fixture
def engine(folder: Path) -> Engine:
    made = TransformersEngine()
    made.load(settings_of(folder), version(folder))
    return made


_whole: dict[tuple[int, int], dict[tuple[int, int], SequenceResult]] = {}


def whole_share(engine: Engine, prompts: int, samples: int) -> dict[tuple[int, int], SequenceResult]:
    """What the `engine` fixture generates in one go, computed once."""
    key = (prompts, samples)
    if key not in _whole:
        _whole[key] = generate(engine, share(prompts, samples))
    return _whole[key]


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_order_and_room_gives_the_same_bits(engine: Engine, data: st.DataObject) -> None:
    tasks = share(8, 3)
    whole = whole_share(engine, 8, 3)
    order = data.draw(st.permutations(tasks))
    actors = data.draw(st.integers(1, 4))
    budget = data.draw(st.sampled_from([None, 200, 1000]))
    parts: dict[tuple[int, int], SequenceResult] = {}
    for actor in range(actors):
        if mine := order[actor::actors]:
            parts |= generate(engine, mine, budget=budget)
    assert parts == whole


def test_cut_after_every_token_and_continued_elsewhere_gives_the_same_bits(
    new_engine: Callable[[], Engine], folder: Path, engine: Engine
) -> None:
    tasks = share(8, 1)
    sampling = SAMPLING.model_copy(update={"max_response_tokens": 18})
    whole = generate(engine, tasks, sampling)
    elsewhere = new_engine()
    elsewhere.load(settings_of(folder), version(folder))
    for cut in range(1, sampling.max_response_tokens):
        run = engine.start(tasks, sampling, None)
        finished = [result for _ in range(cut) for result in run.step()]
        partials = run.unfinished()
        for partial in partials:
            assert partial.finish_reason == "cut"
            assert partial.response_tokens == whole[partial.prompt, partial.index].response_tokens[:cut]
        done = {(result.prompt, result.index): result for result in finished}
        rest = [task for task in tasks if (task.prompt, task.index) not in done]
        assert len(partials) == len(rest)
        if rest:
            done |= generate(elsewhere, continued(rest, partials)[::-1], sampling)
        assert done == whole


def test_a_prompt_is_computed_once_for_its_group_however_little_room_there_is(engine: Engine) -> None:
    tasks = share(8, 3)
    prompts = sum(len(prompt_tokens(prompt)) for prompt in range(8))
    for budget in (None, 130, 1000):
        run = engine.start(tasks, SAMPLING, budget)
        results = finish(run)
        assert run.computed.prompt == prompts
        assert run.computed.response == sum(len(result.response_tokens) for result in results)


def test_the_room_is_the_engines_and_not_the_shares(engine: Engine) -> None:
    longest = max(len(prompt_tokens(prompt)) for prompt in range(8)) + SAMPLING.max_response_tokens
    small, large = (engine.start(share(8, samples), SAMPLING, 4 * padded(longest)) for samples in (1, 3))
    assert small.room == large.room == EngineRoom(sequences=4, kv_tokens=4 * padded(longest))
    assert engine.start(share(1, 1), SAMPLING, None).room.sequences > 1


def test_layers_with_and_without_a_window_attend_as_the_model_does(tmp_path: Path, tiny_model: Path) -> None:
    changes = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    folder = save_model(tmp_path, tiny_model, **changes)
    engine = TransformersEngine()
    engine.load(settings_of(folder), version(folder))
    tasks = share(8, 1)
    results = generate(engine, tasks)
    for task in tasks:
        result = results[task.prompt, task.index]
        expected = reference_log_probs(folder, task, result.response_tokens, 1.0)
        assert result.log_probs == pytest.approx(expected, abs=2e-5)


def test_layers_without_keys_and_values_are_refused(
    new_engine: Callable[[], Engine], tmp_path: Path, tiny_model: Path
) -> None:
    folder = save_model(tmp_path, tiny_model)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("full_attention", "linear_attention"))
    with pytest.raises(TaskError) as caught:
        new_engine().load(settings_of(folder), version(folder))
    assert caught.value.reason == "model_unloadable"


def test_a_model_without_scaled_dot_product_attention_is_refused(
    new_engine: Callable[[], Engine], tmp_path: Path, tiny_model: Path
) -> None:
    torch.manual_seed(0)
    BloomForCausalLM(BloomConfig(vocab_size=66, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path / name)
    with pytest.raises(TaskError, match="needs a model with scaled dot-product attention; bloom has") as caught:
        new_engine().load(settings_of(tmp_path), version(tmp_path))
    assert caught.value.reason == "model_unloadable"


def test_running_out_of_memory_is_an_error_of_its_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    run = engine.start(share(2, 2), SAMPLING, None)
    monkeypatch.setattr(torch.nn.functional, "embedding", exhausted)
    with pytest.raises(TaskError, match="not have enough memory") as caught:
        run.step()
    assert caught.value.reason == "out_of_memory"
    assert caught.value.retryable


@pytest.mark.slow
def test_sleep_keeps_nothing_of_model_and_cache_in_memory(folder: Path) -> None:
    def held() -> set[int]:
        """The memory of all tensors of this process, by where it is."""
        gc.collect()
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        return {each.untyped_storage().data_ptr() for each in found if each.nbytes}

    others = held()
    engine = TransformersEngine()
    engine.load(settings_of(folder), version(folder))
    generate(engine, share(8, 2))
    weights = len(load_file(folder / "model.safetensors"))
    assert len(held() - others) > weights
    engine.sleep()
    assert held() - others == set()


def test_what_sleep_gives_back_the_machine_has_again_each_time(tmp_path: Path, tiny_model: Path) -> None:
    folder = save_model(tmp_path, tiny_model, hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    size = (folder / "model.safetensors").stat().st_size
    engine, process = TransformersEngine(), psutil.Process()
    for _ in range(4):
        engine.load(settings_of(folder), version(folder))
        generate(engine, share(2, 2))
        held = process.memory_info().rss
        engine.sleep()
        assert held - process.memory_info().rss > 0.9 * size


def published(folder: Path, to: Path, seed: int) -> WeightsReference:
    """A version of the model that a learner might have published."""
    model = save_model(to / str(seed), folder, seed=seed)
    policy = load_policy(settings_of(model), version(model))
    publish_weights(str(to / f"step-{seed}"), policy, load_tokenizer(settings_of(model), version(model)))
    return version(to / f"step-{seed}", seed)


def assert_holds(engine: TransformersEngine, folder: Path, weights: WeightsReference) -> None:
    """It samples what an engine samples that has never held anything else."""
    fresh = TransformersEngine()
    fresh.load(settings_of(folder), weights)
    assert generate(engine, share(4, 2)) == generate(fresh, share(4, 2))


def test_a_swap_that_breaks_off_in_the_middle_leaves_no_mixture(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    first = published(folder, tmp_path, 1)
    prefetched = engine.prefetch(settings_of(folder), first)
    assert len(prefetched.pairs) > 4
    prefetched.pairs.insert(4, (prefetched.pairs[4][0], None))  # type: ignore[arg-type]
    engine.load(settings_of(folder), first, prefetched)
    assert_holds(engine, folder, first)


def test_a_swap_that_breaks_off_with_weights_that_are_gone_leaves_the_engine_empty(
    engine: TransformersEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = published(folder, tmp_path, 1)
    prefetched = engine.prefetch(settings_of(folder), first)

    def breaks_off(prefetched: PrefetchedWeights) -> None:
        take_over(replace(prefetched, pairs=prefetched.pairs[:3]))
        shutil.rmtree(first.uri)
        raise MemoryError

    monkeypatch.setattr(stored, "take_over", breaks_off)
    with pytest.raises(TaskError, match="does not exist"):
        engine.load(settings_of(folder), first, prefetched)
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(share(1, 1), SAMPLING, None)
    engine.load(settings_of(folder), version(folder))
    assert_holds(engine, folder, version(folder))


def test_prefetched_weights_of_another_version_are_not_taken(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    first, second = published(folder, tmp_path, 1), published(folder, tmp_path, 2)
    engine.load(settings_of(folder), second, engine.prefetch(settings_of(folder), first))
    assert_holds(engine, folder, second)


def test_nothing_is_prefetched_where_host_memory_is_short(
    engine: TransformersEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = published(folder, tmp_path, 1)
    policy = engine.prefetch(settings_of(folder), first).policy
    size = sum(parameter.nbytes for parameter in policy.parameters())
    monkeypatch.setattr("rlhfless_functions.generation.engines.transformers.free_host_bytes", lambda: 2 * size - 1)
    with pytest.raises(TaskError, match=f"they take {size} bytes") as refused:
        engine.prefetch(settings_of(folder), first)
    assert refused.value.reason == "out_of_memory"
