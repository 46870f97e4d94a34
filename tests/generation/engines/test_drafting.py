"""Drafting changes no sampled bit, for all drafts, and at every point where a response is cut."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rlhfless_functions.data.draft_history import vocabulary_digest, write_draft_history
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.generation.drafting import drafter
from rlhfless_functions.generation.drafting.switch import Switch
from rlhfless_functions.generation.engines.base import Growth, SequenceResult, SequenceTask
from rlhfless_functions.generation.engines.continuous_batch import ContinuousBatch
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.settings import SamplingSettings
from tests.generation.engines.shares import (
    SAMPLING,
    Results,
    continued,
    finish,
    generate,
    prompt_tokens,
    save_model,
    settings_of,
    share,
    version,
)
from tests.model.families import FAMILIES, save

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("engine-model"), tiny_model)


def engine_of(folder: Path) -> TransformersEngine:
    made = TransformersEngine()
    made.load(settings_of(folder), version(folder))
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersEngine:
    return engine_of(folder)


@pytest.fixture(autouse=True)
def drafts_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed decides nothing here: everything that can be drafted is drafted."""
    monkeypatch.setattr(Switch, "on", lambda *_: True)
    monkeypatch.setattr(drafter, "worthwhile", lambda chances, *_: min(len(chances), 60))
    monkeypatch.setattr(drafter, "_LEAST_CHANCE", 0.0)


def keep(folder: Path, responses: Sequence[SequenceResult], model: Path, changed: float = 0.0) -> list[str]:
    """A history of these responses, some of their tokens replaced; returns what requests name."""
    numbers = np.random.default_rng(0)
    known = []
    for each in responses:
        tokens = [
            int(numbers.integers(0, 90)) if numbers.random() < changed else token for token in each.response_tokens
        ]
        known.append(GeneratedSample(each.prompt, each.index, prompt_tokens(each.prompt), tokens, [], "stop", []))
    digest = vocabulary_digest(AutoTokenizer.from_pretrained(model).get_vocab())
    write_draft_history(str(folder / "part.parquet"), known, digest)
    return [str(folder)]


def start(
    engine: TransformersEngine,
    tasks: Sequence[SequenceTask],
    drafts: list[str],
    sampling: SamplingSettings = SAMPLING,
    budget: int | None = None,
    *,
    keep_kv_cache: bool = False,
) -> ContinuousBatch:
    """A run whose history has been read."""
    run = engine.start(tasks, sampling, budget, drafts, keep_kv_cache=keep_kv_cache)
    assert run._drafter is not None
    if run._drafter._history is not None:
        run._drafter._history._thread.join()
    return run


def drafted(engine: TransformersEngine, tasks: Sequence[SequenceTask], drafts: list[str], **changes: object) -> Results:
    run = start(engine, tasks, drafts, **changes)  # type: ignore[arg-type]
    return {(result.prompt, result.index): result for result in finish(run)}


def test_a_history_of_the_same_responses_gives_many_tokens_a_pass(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    tasks = share(8, 1)
    whole = generate(engine, tasks)
    run = start(engine, tasks, keep(tmp_path, list(whole.values()), folder))
    results = {(result.prompt, result.index): result for result in finish(run)}
    assert results == whole
    counts = run.decoding()
    assert counts.tokens == sum(len(result.response_tokens) for result in whole.values())
    assert counts.accepted == counts.tokens - counts.sequence_passes
    assert counts.tokens > 4 * counts.sequence_passes


def test_sequences_that_join_later_are_drafted_for_from_an_older_step(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    first, *others = share(8, 1)
    whole = generate(engine, [first, *others])
    (tmp_path / "newest").mkdir()
    drafts = [*keep(tmp_path / "older", list(whole.values()), folder), str(tmp_path / "newest")]
    passes = []
    for prompts in (frozenset[int](), frozenset(task.prompt for task in others)):
        run = engine.start([first], SAMPLING, None, drafts, growth=Growth(8, 64, prompts))
        assert run._drafter is not None and run._drafter._history is not None
        run._drafter._history._thread.join()
        for task in others:
            run.add(task)
        assert {(result.prompt, result.index): result for result in finish(run)} == whole
        passes.append(run.decoding().passes)
    assert passes[1] < passes[0]


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_drafts_split_order_room_and_cut_give_the_same_bits(
    engine: TransformersEngine, folder: Path, tmp_path: Path, data: st.DataObject
) -> None:
    tasks = share(8, 3)
    whole = generate(engine, tasks)
    drafts = keep(tmp_path, list(whole.values()), folder, changed=data.draw(st.sampled_from([0.0, 0.1, 0.5])))
    order = data.draw(st.permutations(tasks))
    actors = data.draw(st.integers(1, 4))
    budget = data.draw(st.sampled_from([None, 200, 1000]))
    cut = data.draw(st.integers(0, 6))
    keeps = data.draw(st.booleans())
    parts: Results = {}
    for actor in range(actors):
        mine = order[actor::actors]
        if not mine:
            continue
        run = start(engine, mine, drafts, budget=budget, keep_kv_cache=keeps)
        parts |= {(result.prompt, result.index): result for _ in range(cut) for result in run.step()}
        rest = continued([task for task in mine if (task.prompt, task.index) not in parts], run.unfinished())
        if rest:
            # Elsewhere with drafts or without.
            with_drafts = data.draw(st.booleans())
            changes = {"budget": budget, "keep_kv_cache": keeps}
            parts |= drafted(engine, rest, drafts, **changes) if with_drafts else generate(engine, rest)
    assert parts == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_with_drafts(family: str, tmp_path: Path, tiny_model: Path) -> None:
    model = save(FAMILIES[family], tmp_path / "model", tiny_model)
    engine = engine_of(model)
    tasks = [replace(task, prompt_tokens=[token % 60 + 2 for token in task.prompt_tokens]) for task in share(6, 2)]
    whole = generate(engine, tasks)
    run = start(engine, tasks, keep(tmp_path / "drafts", list(whole.values()), model, changed=0.1))
    results = {(result.prompt, result.index): result for result in finish(run)}
    assert results == whole
    assert run.decoding().accepted > 0


def test_greedy_sampling_is_the_same(engine: TransformersEngine, folder: Path, tmp_path: Path) -> None:
    sampling = SAMPLING.model_copy(update={"temperature": 0.0})
    whole = generate(engine, share(8, 1), sampling)
    drafts = keep(tmp_path, list(whole.values()), folder, changed=0.1)
    assert drafted(engine, share(8, 1), drafts, sampling=sampling) == whole


def test_a_stop_string_within_a_pass_ends_the_response_at_its_token(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    free = generate(engine, share(8, 3))
    text = AutoTokenizer.from_pretrained(folder).decode(free[2, 0].response_tokens)
    sampling = SAMPLING.model_copy(update={"stop": [text[4:6], text[9:10]]})
    whole = generate(engine, share(8, 3), sampling)
    assert whole != free
    drafts = keep(tmp_path, list(free.values()), folder)
    assert drafted(engine, share(8, 3), drafts, sampling=sampling) == whole


@pytest.mark.parametrize("longest", [1, 2, 3, 7])
def test_the_longest_response_is_never_exceeded(
    engine: TransformersEngine, folder: Path, tmp_path: Path, longest: int
) -> None:
    sampling = SAMPLING.model_copy(update={"max_response_tokens": longest})
    drafts = keep(tmp_path, list(generate(engine, share(8, 2)).values()), folder)
    assert drafted(engine, share(8, 2), drafts, sampling=sampling) == generate(engine, share(8, 2), sampling)


def test_drafts_that_are_no_tokens_of_the_model_are_not_tried(
    engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    whole = generate(engine, share(8, 1))
    wrong = [replace(each, response_tokens=[70, -5, 2**31 - 1] * 8) for each in whole.values()]
    assert drafted(engine, share(8, 1), keep(tmp_path, wrong, folder)) == whole


def test_a_rejected_draft_whose_keys_are_not_finite_leaves_no_trace(tmp_path: Path, tiny_model: Path) -> None:
    model = save_model(tmp_path / "model", tiny_model, tie_word_embeddings=False)
    tasks = share(2, 1)
    sampled = {token for each in generate(engine_of(model), tasks).values() for token in each.response_tokens}
    unsaid = min(set(range(2, 66)) - sampled - {token for task in tasks for token in task.prompt_tokens})
    file = model / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][unsaid] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    engine = engine_of(model)
    whole = generate(engine, tasks)
    wrong = []
    for each in whole.values():
        tokens = [unsaid if place % 3 == 2 else token for place, token in enumerate(each.response_tokens)]
        wrong.append(replace(each, response_tokens=tokens))
    run = start(engine, tasks, keep(tmp_path / "drafts", wrong, model))
    assert {(result.prompt, result.index): result for result in finish(run)} == whole
    assert run.decoding().drafted > run.decoding().accepted


def test_without_a_history_siblings_and_the_response_itself_are_drafted_from(engine: TransformersEngine) -> None:
    tasks = share(4, 6)
    assert drafted(engine, tasks, []) == generate(engine, tasks)
