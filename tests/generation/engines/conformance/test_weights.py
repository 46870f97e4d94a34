"""A response is of one version's weights, and an engine whose weights cannot be used stays usable."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfless_functions.generation.engines.base import Engine, NonFiniteLogitsError, SequenceTask
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings
from rlhfless_functions.weights import attach_adapter, load_policy, load_tokenizer, publish_adapter, publish_weights
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


def test_weights_are_swapped_whole(new_engine: NewEngine, engine: Engine, folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path, folder, seed=7)
    tasks = share(8, 2)
    before = generate(engine, tasks)
    engine.load(settings_of(folder), version(other, 1))
    swapped = generate(engine, tasks)
    fresh = new_engine()
    fresh.load(settings_of(folder), version(other, 1))
    assert_same(swapped, generate(fresh, tasks))
    assert {key: result.response_tokens for key, result in swapped.items()} != {
        key: result.response_tokens for key, result in before.items()
    }
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, tasks), before)


def test_a_prefix_that_was_computed_with_other_weights_is_not_used_again(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path, folder, seed=7)
    long = [2 + 7 * token % 60 for token in range(100)]
    task = SequenceTask(0, 0, long, sample_seed(0, "training", 1, 0, 0))
    generate(engine, [task])
    engine.load(settings_of(folder), version(other, 1))
    result = generate(engine, [task])[0, 0]
    assert result.log_probs == pytest.approx(reference_log_probs(other, task, result.response_tokens, 1.0), abs=2e-4)


def test_weights_that_were_prefetched_while_it_generated_are_swapped_whole(
    new_engine: NewEngine, engine: Engine, folder: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", folder, seed=7)
    policy = load_policy(settings_of(other), version(other))
    publish_weights(str(tmp_path / "1"), policy, load_tokenizer(settings_of(folder), version(folder)))
    first = version(tmp_path / "1", 1)
    tasks = share(8, 2)
    before = generate(engine, tasks)
    run = engine.start(tasks, SAMPLING, None)
    results = run.step()
    with ThreadPoolExecutor(1) as thread:
        prefetching = thread.submit(engine.prefetch, settings_of(folder), first)
        while run.running or run.waiting:
            results += run.step()
    assert_same({(result.prompt, result.index): result for result in results}, before)
    engine.load(settings_of(folder), first, prefetching.result())
    swapped = generate(engine, tasks)
    fresh = new_engine()
    fresh.load(settings_of(folder), first)
    assert_same(swapped, generate(fresh, tasks))
    assert {key: result.response_tokens for key, result in swapped.items()} != {
        key: result.response_tokens for key, result in before.items()
    }


@pytest.mark.parametrize("cut", [1, 9])
def test_a_response_goes_on_with_other_weights_as_if_they_had_seen_its_beginning(
    engine: Engine, folder: Path, tmp_path: Path, cut: int
) -> None:
    """Nothing that the first weights have computed is used again, and what they sampled stays as it is."""
    other = save_model(tmp_path, folder, seed=7)
    tasks = share(8, 2)
    run = engine.start(tasks, SAMPLING, None)
    finished = {(result.prompt, result.index) for _ in range(cut) for result in run.step()}
    begun = {(partial.prompt, partial.index): partial for partial in run.unfinished()}
    rest = continued([task for task in tasks if (task.prompt, task.index) not in finished], list(begun.values()))
    engine.load(settings_of(folder), version(other, 1))
    results = generate(engine, rest)
    switched = 0
    for task in rest:
        result, kept = results[task.prompt, task.index], begun[task.prompt, task.index]
        tokens = len(kept.response_tokens)
        assert result.response_tokens[:tokens] == kept.response_tokens
        assert result.log_probs[:tokens] == pytest.approx(kept.log_probs, abs=1e-7)
        expected = reference_log_probs(other, task, result.response_tokens, 1.0)
        assert result.log_probs[tokens:] == pytest.approx(expected[tokens:], abs=2e-4)
        switched += len(result.response_tokens) > tokens
        assert kept.log_probs != pytest.approx(expected[:tokens], abs=1e-2), "the two models differ"
    assert switched >= 8


@pytest.mark.parametrize("with_head", [False, True])
def test_tied_weights_are_swapped_in_the_output_layer_too(
    new_engine: NewEngine, tmp_path: Path, tiny_model: Path, with_head: bool
) -> None:
    first = save_model(tmp_path / "first", tiny_model, tie_word_embeddings=True)
    other = save_model(tmp_path / "other", tiny_model, seed=7, tie_word_embeddings=True)
    if with_head:
        file = other / "model.safetensors"
        weights = load_file(file)
        save_file(
            weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, metadata={"format": "pt"}
        )
    engine = new_engine()
    engine.load(settings_of(first), version(first))
    generate(engine, share(2, 1))
    engine.load(settings_of(first), version(other, 1))
    for task in share(4, 1):
        result = generate(engine, [task])[task.prompt, 0]
        expected = reference_log_probs(other, task, result.response_tokens, 1.0)
        assert result.log_probs == pytest.approx(expected, abs=2e-4)


def test_another_model_takes_the_place_of_the_first(
    new_engine: NewEngine, engine: Engine, tmp_path: Path, tiny_model: Path
) -> None:
    other = save_model(tmp_path, tiny_model, "mistral", hidden_size=64)
    generate(engine, share(2, 1))
    engine.load(settings_of(other), version(other))
    results = generate(engine, share(2, 1))
    fresh = new_engine()
    fresh.load(settings_of(other), version(other))
    assert_same(results, generate(fresh, share(2, 1)))


@pytest.mark.parametrize("fault", ["missing", "truncated", "other shape"])
def test_weights_that_cannot_be_had_leave_the_engine_empty_but_usable(
    engine: Engine, folder: Path, tmp_path: Path, fault: str
) -> None:
    bad = tmp_path / "bad"
    if fault == "other shape":
        save_model(bad, folder, hidden_size=64)
    elif fault == "truncated":
        shutil.copytree(folder, bad)
        file = bad / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    before = generate(engine, share(2, 1))
    with pytest.raises(TaskError) as caught:
        engine.load(settings_of(folder), version(bad, 1))
    assert caught.value.reason == ("artifact_missing" if fault == "missing" else "model_unloadable")
    assert str(bad) in str(caught.value)
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(share(2, 1), SAMPLING, None)
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, share(2, 1)), before)


def test_an_adapter_is_swapped_on_its_backbone(new_engine: NewEngine, folder: Path, tmp_path: Path) -> None:
    model = settings_of(folder, lora=LoraSettings(rank=4))
    policy = attach_adapter(load_policy(settings_of(folder), version(folder)), LoraSettings(rank=4))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    publish_adapter(str(tmp_path / "adapter"), policy)
    engine = new_engine()
    engine.load(model, version(folder))
    plain = generate(engine, share(4, 2))
    engine.load(model, version(folder, 1, str(tmp_path / "adapter")))
    adapted = generate(engine, share(4, 2))
    engine.load(model, version(folder))
    assert_same(generate(engine, share(4, 2)), plain)
    assert [result.response_tokens for result in plain.values()] != [
        result.response_tokens for result in adapted.values()
    ]
    merged = policy.merge_and_unload().eval()
    for task in share(4, 2):
        result = adapted[task.prompt, task.index]
        with torch.no_grad():
            logits = merged(torch.tensor([[*task.prompt_tokens, *result.response_tokens]])).logits[0]
        start = len(task.prompt_tokens) - 1
        log_probs = torch.log_softmax(logits[start : start + len(result.response_tokens)], -1)
        expected = log_probs.gather(1, torch.tensor(result.response_tokens)[:, None])[:, 0].tolist()
        assert result.log_probs == pytest.approx(expected, abs=1e-4)


def test_non_finite_logits_name_the_sequence_and_leave_nothing_behind(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    """Token 65 has a NaN embedding: the first to sample it is the first to fail."""
    before = generate(engine, share(8, 2))
    poisoned = shutil.copytree(folder, tmp_path / "poisoned")
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][65] = float("nan")
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    engine.load(settings_of(folder), version(poisoned, 1))
    tasks = [SequenceTask(task.prompt, task.index, [2, 3, 4], task.seed) for task in share(8, 4)]
    with pytest.raises(NonFiniteLogitsError) as caught:
        generate(engine, tasks)
    fine = {(task.prompt, task.index): task for task in tasks}
    assert (caught.value.prompt, caught.value.index) in fine
    assert caught.value.position > 0
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, share(8, 2)), before)
