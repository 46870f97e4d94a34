"""A response that goes on with newer weights may keep the keys and values of older ones. No other response gets any."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlhfless_functions.generation.engines.base import Engine, EngineRun, Growth, SequenceResult, SequenceTask
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.settings import EngineName, SamplingSettings
from tests.generation.engines.shares import (
    NewEngine,
    assert_same,
    continued,
    finish,
    log_probs_with_kept_keys,
    long_prompt,
    reference_log_probs,
    save_model,
    settings_of,
    version,
)

SAMPLING = SamplingSettings(max_prompt_tokens=64, max_response_tokens=60)
BLOCK = 32
"""Tokens of a block of vLLM on a CPU. It keeps whole blocks."""


def share(prompts: int, samples: int, first: int = 0) -> list[SequenceTask]:
    """Prompts of several blocks."""
    return [
        SequenceTask(prompt, index, long_prompt(prompt, 40 + prompt), sample_seed(0, "training", 1, prompt, index))
        for prompt in range(first, first + prompts)
        for index in range(samples)
    ]


@pytest.fixture(scope="module")
def models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three versions of a model that have little in common."""
    return [folder, *(save_model(tmp_path_factory.mktemp(f"v{seed}"), folder, seed=seed) for seed in (7, 8))]


def begin(
    engine: Engine, tasks: Sequence[SequenceTask], steps: int, *, keep: bool = True, growth: Growth | None = None
) -> list[SequenceTask]:
    """What is left of a share after some steps."""
    run = engine.start(tasks, SAMPLING, None, keep_kv_cache=keep, growth=growth)
    done = {(result.prompt, result.index) for _ in range(steps) for result in run.step()}
    return continued([task for task in tasks if (task.prompt, task.index) not in done], run.unfinished())


def go_on(
    engine: Engine, tasks: Sequence[SequenceTask], budget: int | None = None
) -> tuple[EngineRun, dict[tuple[int, int], SequenceResult]]:
    run = engine.start(tasks, SAMPLING, budget, keep_kv_cache=True)
    return run, {(result.prompt, result.index): result for result in finish(run)}


def kept_keys(name: EngineName, task: SequenceTask) -> int:
    """Tokens whose keys and values an engine has kept of a response that it begins to continue."""
    held = len(task.prompt_tokens) + len(task.response_tokens) - 1
    return held if name == "transformers" else held // BLOCK * BLOCK


def assert_kept(result: SequenceResult, task: SequenceTask, passes: Sequence[tuple[Path, int]], newest: Path) -> None:
    """That the newest weights have continued a response over what the passes have computed."""
    tokens = len(task.response_tokens)
    assert result.response_tokens[:tokens] == list(task.response_tokens)
    assert result.log_probs[:tokens] == pytest.approx(task.log_probs, abs=1e-7)
    whole = len(task.prompt_tokens) + len(result.response_tokens)
    expected = log_probs_with_kept_keys([*passes, (newest, whole)], task, result.response_tokens)
    assert result.log_probs[tokens:] == pytest.approx(expected[tokens:], abs=2e-4)


@pytest.mark.parametrize("steps", [1, 30])
def test_a_response_goes_on_with_the_keys_and_values_of_older_weights(
    engine: Engine, name: EngineName, models: list[Path], steps: int
) -> None:
    rest = begin(engine, share(4, 3), steps)
    engine.load(settings_of(models[0]), version(models[1], 1))
    run, results = go_on(engine, rest)
    assert len(rest) >= 8
    differ = 0
    for task in rest:
        result = results[task.prompt, task.index]
        assert_kept(result, task, [(models[0], kept_keys(name, task))], models[1])
        anew = reference_log_probs(models[1], task, result.response_tokens, 1.0)
        tokens = len(task.response_tokens)
        differ += result.log_probs[tokens:] != pytest.approx(anew[tokens:], abs=1e-2)
    assert differ >= 8, "the older keys and values matter"
    counts = run.decoding()
    prompts = {task.prompt: len(task.prompt_tokens) for task in rest}
    assert counts.kept_responses == len(rest)
    if name == "transformers":
        assert counts.kept_tokens == sum(prompts.values()) + sum(len(task.response_tokens) - 1 for task in rest)
        assert run.computed.prompt == 0
    else:
        assert 0 < counts.kept_tokens <= sum(kept_keys(name, task) for task in rest)


def test_a_response_may_go_on_several_times(engine: Engine, name: EngineName, models: list[Path]) -> None:
    rest = begin(engine, share(2, 2), 10)
    engine.load(settings_of(models[0]), version(models[1], 1))
    first = {(task.prompt, task.index): kept_keys(name, task) for task in rest}
    rest = begin(engine, rest, 30)
    engine.load(settings_of(models[0]), version(models[2], 2))
    _, results = go_on(engine, rest)
    assert rest
    for task in rest:
        passes = [(models[0], first[task.prompt, task.index]), (models[1], kept_keys(name, task))]
        assert_kept(results[task.prompt, task.index], task, passes, models[2])


@pytest.mark.parametrize("room", [8, None])
def test_new_samples_of_the_same_prompts_are_those_of_the_newest_weights_alone(
    new_engine: NewEngine, engine: Engine, models: list[Path], name: EngineName, room: int | None
) -> None:
    """Where there is little room, those of another prompt come first. The others join as these leave, and find the kept
    rows of their prompts still there."""
    # No row is kept where the batch before had too few of them for the next one.
    rest = begin(engine, share(3, 2), 20, growth=Growth(sequences=16, prompt_tokens=64))
    assert len({task.prompt for task in rest}) >= 2
    new = [task for task in share(4, 5) if task.index >= 2]
    engine.load(settings_of(models[0]), version(models[1], 1))
    _, results = go_on(engine, [*new[:1:-1], *rest, *new[:2]], room and room * 128)
    for task in rest:
        assert_kept(results[task.prompt, task.index], task, [(models[0], kept_keys(name, task))], models[1])
    fresh = new_engine()
    fresh.load(settings_of(models[0]), version(models[1], 1))
    wanted = {(result.prompt, result.index): result for result in finish(fresh.start(new, SAMPLING, None))}
    mine = {key: result for key, result in results.items() if key in wanted}
    assert_same(mine, wanted)
    if name == "transformers" and not torch.cuda.is_available():
        assert mine == wanted, "to the bit"


@pytest.mark.parametrize("between", ["a run without it", "another run", "a sleep", "another model", "no such run"])
def test_keys_and_values_that_are_gone_are_computed_anew(
    engine: Engine, folder: Path, models: list[Path], tmp_path: Path, between: str
) -> None:
    rest = begin(engine, share(3, 2), 20, keep=between != "no such run")
    if between == "a run without it":
        begin(engine, share(3, 2), 3, keep=False)
    elif between == "another run":
        go_on(engine, share(2, 2, first=10))
    elif between == "a sleep":
        engine.sleep()
    elif between == "another model":
        other = save_model(tmp_path, folder, hidden_size=64)
        engine.load(settings_of(other), version(other))
    engine.load(settings_of(models[0]), version(models[1], 1))
    run, results = go_on(engine, rest)
    for task in rest:
        assert_kept(results[task.prompt, task.index], task, [], models[1])
    assert (run.decoding().kept_tokens, run.decoding().kept_responses) == (0, 0)


def test_a_response_that_began_anew_finds_nothing_of_its_first_attempt(engine: Engine, models: list[Path]) -> None:
    tasks = share(3, 2)
    begin(engine, tasks, 20)
    engine.load(settings_of(models[0]), version(models[1], 1))
    _, results = go_on(engine, tasks)
    for task in tasks:
        assert_kept(results[task.prompt, task.index], task, [], models[1])


def test_weights_that_come_back_find_nothing_of_their_first_time(engine: Engine, models: list[Path]) -> None:
    """Responses that other weights have continued have left keys and values behind."""
    rest = begin(engine, share(3, 2), 20)
    engine.load(settings_of(models[0]), version(models[1], 1))
    go_on(engine, rest)
    engine.load(settings_of(models[0]), version(models[0]))
    tasks = [SequenceTask(t.prompt, t.index, t.prompt_tokens, t.seed) for t in share(3, 2)]
    _, results = go_on(engine, tasks)
    for task in tasks:
        assert_kept(results[task.prompt, task.index], task, [], models[0])
    for keep in (False, True):
        results = {
            (result.prompt, result.index): result
            for result in finish(engine.start(rest, SAMPLING, None, keep_kv_cache=keep))
        }
        for task in rest:
            assert_kept(results[task.prompt, task.index], task, [], models[0])
