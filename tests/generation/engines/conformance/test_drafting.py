"""Drafting changes how many passes there are, and nothing else."""

from collections.abc import Sequence
from pathlib import Path
from threading import enumerate as threads

import pytest

from rlhfless_functions.data.draft_history import vocabulary_digest, write_draft_history
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.generation.drafting import switch
from rlhfless_functions.generation.engines.base import Engine, EngineRun, SequenceTask
from rlhfless_functions.settings import SamplingSettings
from rlhfless_functions.weights.tokenizers import load_tokenizer
from tests.generation.engines.shares import (
    SAMPLING,
    Results,
    assert_same,
    continued,
    finish,
    generate,
    settings_of,
    share,
    version,
)

TASKS = share(prompts=6, samples=4)


def write_drafts(to: Path, tasks: Sequence[SequenceTask], results: Results, model: Path, shift: int = 0) -> str:
    """A folder of drafts in which each token is so many higher than what was sampled."""
    responses = [
        GeneratedSample(
            task.prompt,
            task.index,
            list(task.prompt_tokens),
            [token + shift for token in result.response_tokens],
            [0.0] * len(result.response_tokens),
            result.finish_reason,
            [],
        )
        for task in tasks
        if (result := results[task.prompt, task.index])
    ]
    digest = vocabulary_digest(load_tokenizer(settings_of(model), version(model)).get_vocab())
    write_draft_history(str(to / "part.parquet"), responses, digest)
    return str(to)


def started(
    engine: Engine, tasks: Sequence[SequenceTask], drafts: Sequence[str], sampling: SamplingSettings
) -> EngineRun:
    """A run that has read its drafts."""
    run = engine.start(tasks, sampling, None, drafts)
    for thread in threads():
        if thread.name == "drafts":
            thread.join()
    return run


def by_key(run: EngineRun) -> Results:
    return {(result.prompt, result.index): result for result in finish(run)}


@pytest.fixture(autouse=True)
def batches_of_any_size_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "MOST_SEQUENCES", {})
    # On a busy machine drafts may not pay for some passes, and then none are tried for a while.
    monkeypatch.setattr(switch, "TRIAL_PASSES", 10**9)


@pytest.fixture
def plain(engine: Engine) -> Results:
    return generate(engine, TASKS)


def test_drafts_of_the_same_responses_save_passes(engine: Engine, folder: Path, plain: Results, tmp_path: Path) -> None:
    run = started(engine, TASKS, [write_drafts(tmp_path, TASKS, plain, folder)], SAMPLING)
    assert_same(by_key(run), plain)
    tokens = sum(len(result.response_tokens) for result in plain.values())
    assert 0 < run.computed.sequence_passes < 0.7 * tokens
    assert run.computed.response == tokens


@pytest.mark.parametrize("shift", [1, 60, 1000])
def test_wrong_drafts_change_nothing(engine: Engine, folder: Path, plain: Results, tmp_path: Path, shift: int) -> None:
    run = started(engine, TASKS, [write_drafts(tmp_path, TASKS, plain, folder, shift)], SAMPLING)
    assert_same(by_key(run), plain)


def test_no_history_changes_nothing(engine: Engine, plain: Results, tmp_path: Path) -> None:
    assert_same(by_key(started(engine, TASKS, [], SAMPLING)), plain)
    assert_same(by_key(started(engine, TASKS, [str(tmp_path / "gone")], SAMPLING)), plain)


def test_a_stop_string_ends_a_response_in_the_middle_of_a_draft(engine: Engine, folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(settings_of(folder), version(folder))
    unstopped = generate(engine, TASKS)
    characters = [tokenizer.decode(result.response_tokens[5:6]) for result in unstopped.values()]
    sampling = replace_stop(max(set(characters), key=characters.count))
    wanted = generate(engine, TASKS, sampling)
    assert any(result.finish_reason == "stop" for result in wanted.values())
    # The drafts go on behind the stop strings.
    run = started(engine, TASKS, [write_drafts(tmp_path, TASKS, unstopped, folder)], sampling)
    assert_same(by_key(run), wanted)


def replace_stop(string: str) -> SamplingSettings:
    return SAMPLING.model_copy(update={"stop": [string]})


def test_greedy_tokens_are_drafted_too(engine: Engine, folder: Path, tmp_path: Path) -> None:
    greedy = SAMPLING.model_copy(update={"temperature": 0.0})
    wanted = generate(engine, TASKS, greedy)
    run = started(engine, TASKS, [write_drafts(tmp_path, TASKS, wanted, folder)], greedy)
    assert_same(by_key(run), wanted)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_cut_in_the_middle_of_drafts_goes_on_to_the_same_tokens(
    engine: Engine, folder: Path, plain: Results, tmp_path: Path, passes: int
) -> None:
    drafts = [write_drafts(tmp_path, TASKS, plain, folder)]
    run = started(engine, TASKS, drafts, SAMPLING)
    done = [result for _ in range(passes) for result in run.step()]
    ended = {(result.prompt, result.index): result for result in done}
    left = [task for task in continued(TASKS, run.unfinished()) if (task.prompt, task.index) not in ended]
    rest = by_key(started(engine, left, drafts, SAMPLING)) if left else {}
    assert_same(ended | rest, plain)


def test_a_batch_that_is_smaller_than_the_share(engine: Engine, folder: Path, plain: Results, tmp_path: Path) -> None:
    run = engine.start(TASKS, SAMPLING, 4 * 96, [write_drafts(tmp_path, TASKS, plain, folder)])
    assert_same(by_key(run), plain)


def test_responses_that_end_within_a_draft_at_their_longest(engine: Engine, folder: Path, tmp_path: Path) -> None:
    long = SAMPLING.model_copy(update={"max_response_tokens": 24})
    short = SAMPLING.model_copy(update={"max_response_tokens": 11})
    known = generate(engine, TASKS, long)
    wanted = generate(engine, TASKS, short)
    run = started(engine, TASKS, [write_drafts(tmp_path, TASKS, known, folder)], short)
    assert_same(by_key(run), wanted)
    assert all(len(result.response_tokens) <= 11 for result in wanted.values())
