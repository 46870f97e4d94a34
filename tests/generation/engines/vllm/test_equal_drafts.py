"""Drafting as on a GPU, where all requests of a pass have equally many drafts: the same samples, in passes that graphs
were captured for. The tests of every engine's drafting run here once more."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from rlhfless_functions.generation.drafting import drafter
from rlhfless_functions.generation.engines.vllm import engine as vllm_engine
from rlhfless_functions.generation.engines.vllm.engine import VllmEngine
from rlhfless_functions.generation.engines.vllm.graphs import WIDTHS, capture_widths
from rlhfless_functions.settings import EngineSettings
from tests.generation.engines.conformance.test_drafting import (  # noqa: F401 - fixtures and tests
    TASKS,
    batches_of_any_size_draft,
    by_key,
    started,
    test_a_batch_that_is_smaller_than_the_share,
    test_a_cut_in_the_middle_of_drafts_goes_on_to_the_same_tokens,
    test_a_stop_string_ends_a_response_in_the_middle_of_a_draft,
    test_drafts_of_the_same_responses_save_passes,
    test_greedy_tokens_are_drafted_too,
    test_no_history_changes_nothing,
    test_responses_that_end_within_a_draft_at_their_longest,
    test_wrong_drafts_change_nothing,
    write_drafts,
)
from tests.generation.engines.shares import SAMPLING, Results, assert_same, generate, save_model, settings_of, version
from tests.generation.engines.vllm.gpu_graphs import graph_of, learn_graphs, runner_on_a_gpu

torch.set_num_threads(1)
MOST_ROWS = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("engine-model"), tiny_model)


@pytest.fixture(scope="module")
def kept_engine(folder: Path) -> Iterator[VllmEngine]:
    made = VllmEngine(EngineSettings(drafting="auto"))
    made.load(settings_of(folder), version(folder))
    yield made
    made.close()


@pytest.fixture
def engine(kept_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    def widths(configuration: Any) -> tuple[int, ...]:
        configuration.compilation_config.max_cudagraph_capture_size = MOST_ROWS
        return WIDTHS

    monkeypatch.setattr(vllm_engine, "graph_widths", widths)
    # Speed decides nothing here.
    monkeypatch.setattr(drafter, "best_width", widest)
    return kept_engine


@pytest.fixture
def plain(engine: VllmEngine) -> Results:
    return generate(engine, TASKS)


def widest(_: Any, sequences: int, widths: Sequence[int], most: int, costs: Any) -> int:
    return max(width for width in widths if width == 1 or sequences * width <= most)


@pytest.fixture
def passes(kept_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each request in every pass that only decodes."""
    runner = kept_engine._loaded.engine.model_executor.driver_worker.worker.model_runner  # type: ignore[union-attr]
    seen: list[list[int]] = []
    determine = runner._determine_batch_execution_and_padding

    def spy(**arguments: Any) -> Any:
        batch, count = runner.input_batch, arguments["num_reqs"]
        if (batch.num_computed_tokens_cpu[:count] >= batch.num_prompt_tokens[:count]).all():
            seen.append(arguments["num_scheduled_tokens_np"].tolist())
        return determine(**arguments)

    monkeypatch.setattr(runner, "_determine_batch_execution_and_padding", spy)
    return seen


def kinds(passes: list[list[int]]) -> list[str]:
    """The graph that each pass would take on a GPU."""
    runner = runner_on_a_gpu()
    capture_widths(runner)
    learn_graphs(runner)
    return [graph_of(runner, rows)[0] for rows in passes]


def test_every_pass_has_a_width_that_a_graph_was_captured_for(
    engine: VllmEngine, passes: list[list[int]], folder: Path, plain: Results, tmp_path: Path
) -> None:
    del passes[:]
    run = started(engine, TASKS, [write_drafts(tmp_path, TASKS, plain, folder)], SAMPLING)
    assert_same(by_key(run), plain)
    assert {len(set(rows)) for rows in passes} == {1}
    widths = {rows[0] for rows in passes}
    assert widths <= set(WIDTHS) and max(widths) > 1
    assert set(kinds(passes)) == {"FULL"}
    # Of the drafter's own tokens, not of those that fill a draft up.
    counts = run.decoding()
    assert 0 < counts.accepted <= counts.drafted < sum(sum(rows) - len(rows) for rows in passes)


def test_drafts_of_any_length_would_miss_these_graphs(
    engine: VllmEngine,
    passes: list[list[int]],
    folder: Path,
    plain: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_engine, "graph_widths", lambda _: ())
    del passes[:]
    run = started(engine, TASKS, [write_drafts(tmp_path, TASKS, plain, folder)], SAMPLING)
    assert_same(by_key(run), plain)
    assert "PIECEWISE" in kinds(passes)


def test_near_the_longest_sequence_of_the_model_drafts_are_shorter_for_all(
    engine: VllmEngine, passes: list[list[int]], folder: Path, tmp_path: Path
) -> None:
    positions = engine._loaded.engine.vllm_config.model_config.max_model_len  # type: ignore[union-attr]
    longest = max(len(task.prompt_tokens) for task in TASKS)
    sampling = SAMPLING.model_copy(update={"max_response_tokens": positions - longest})
    wanted = by_key(engine.start(TASKS, sampling, None))
    del passes[:]
    assert_same(by_key(started(engine, TASKS, [write_drafts(tmp_path, TASKS, wanted, folder)], sampling)), wanted)
    assert {len(set(rows)) for rows in passes} == {1}
    assert {rows[0] for rows in passes} == set(WIDTHS)
