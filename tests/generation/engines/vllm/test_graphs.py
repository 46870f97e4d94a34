"""With drafting on, passes with drafts and without take graphs of whole passes, as vLLM itself chooses them."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from rlhfless_functions.generation.engines.vllm.graphs import WIDTHS, capture_widths, graph_widths
from tests.generation.engines.vllm.gpu_graphs import graph_of, learn_graphs, runner_on_a_gpu

MOST = 512
"""Most rows of a pass for which vLLM captures a graph, Blackwell apart."""
ANY_DRAFTS = [[1 + place % 4 for place in range(sequences)] for sequences in (2, 20, 200)]


@pytest.fixture
def runner() -> Any:
    made = runner_on_a_gpu()
    capture_widths(made)
    learn_graphs(made)
    return made


def passes(width: int) -> list[list[int]]:
    return [[width] * sequences for sequences in (1, 2, 7, 8, 31, 32, 100, 128, 500, 512) if sequences * width <= MOST]


def test_without_our_graphs_only_the_longest_drafts_take_graphs_of_whole_passes() -> None:
    plain, drafting = runner_on_a_gpu(draft=0), runner_on_a_gpu()
    learn_graphs(plain)
    learn_graphs(drafting)
    assert {graph_of(plain, rows)[0] for rows in passes(1)} == {"FULL"}
    assert {graph_of(drafting, rows)[0] for rows in passes(1)} == {"PIECEWISE"}
    assert {graph_of(drafting, rows)[0] for rows in passes(4)} == {"PIECEWISE"}
    assert {graph_of(drafting, rows)[0] for rows in ANY_DRAFTS} == {"PIECEWISE"}
    assert {graph_of(drafting, rows)[0] for rows in passes(16)} == {"FULL"}


@pytest.mark.parametrize("width", WIDTHS)
def test_passes_of_each_width_take_a_graph_that_was_captured_for_it(runner: Any, width: int) -> None:
    captured = runner.cudagraph_dispatcher.get_capture_descs()
    for rows in passes(width):
        kind, graph = graph_of(runner, rows)
        assert kind == "FULL"
        assert graph.num_tokens == width * graph.num_reqs and len(rows) <= graph.num_reqs <= len(rows) + 15
        assert any(graph in graphs for mode, graphs in captured if mode.name == "FULL")


def test_other_passes_take_what_they_took_before(runner: Any) -> None:
    assert {graph_of(runner, rows)[0] for rows in ANY_DRAFTS} == {"PIECEWISE"}
    assert graph_of(runner, [1] * 20 + [300])[0] == "PIECEWISE"
    assert graph_of(runner, [1] * 513)[0] == "NONE"
    # A choice leaves nothing behind.
    assert runner.uniform_decode_query_len == runner.cudagraph_dispatcher.uniform_decode_query_len == WIDTHS[-1]


@pytest.mark.parametrize("sequences", [16, 256, 1024])
def test_each_graph_is_captured_with_the_width_that_it_is_looked_up_with(sequences: int) -> None:
    runner = runner_on_a_gpu(sequences)
    captured: list[tuple[str, Any]] = []

    def run(num_tokens: int, *, cudagraph_runtime_mode: Any, uniform_decode: bool, **_: Any) -> None:
        # As `_dummy_run` lays a pass out.
        width = runner.uniform_decode_query_len if uniform_decode else num_tokens
        requests = min(sequences, -(-num_tokens // width)) if uniform_decode else min(num_tokens, sequences)
        kind, graph, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=num_tokens,
            num_reqs=requests,
            num_scheduled_tokens_np=None,
            max_num_scheduled_tokens=width,
            force_uniform_decode=uniform_decode,
        )
        assert kind is cudagraph_runtime_mode
        captured.append((kind.name, graph))

    runner._dummy_run = run
    capture_widths(runner)
    learn_graphs(runner)
    for mode, graphs in runner.cudagraph_dispatcher.get_capture_descs():
        for graph in graphs:
            runner._warmup_and_capture(graph, cudagraph_runtime_mode=mode)
            assert captured[-1] == (mode.name, graph)
    widths = {graph.num_tokens // graph.num_reqs for kind, graph in captured if kind == "FULL"}
    assert widths == set(WIDTHS)


def test_requests_have_equally_many_rows_only_where_there_are_graphs_of_whole_decode_passes() -> None:
    from vllm.config import CUDAGraphMode

    found = {
        mode.name: graph_widths(SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode)))
        for mode in CUDAGraphMode
    }
    assert found == {
        "NONE": (),
        "PIECEWISE": (),
        # These graphs are of passes of all kinds.
        "FULL": (),
        "FULL_DECODE_ONLY": WIDTHS,
        "FULL_AND_PIECEWISE": WIDTHS,
    }
