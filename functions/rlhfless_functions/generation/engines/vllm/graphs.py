"""CUDA graphs of whole passes with drafts.

vLLM captures a graph of a whole decode pass only for passes in which each request has the longest draft. All others,
those without drafts too, would run layer by layer, with attention outside of the graphs. Here it captures graphs for
each of a few widths, and the drafter gives all requests of a pass the same one. This replaces three methods of vLLM
0.32, in `vllm/v1/worker/gpu_model_runner.py` and `vllm/v1/cudagraph_dispatcher.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhfless_functions.generation.engines.vllm.drafting import LONGEST_DRAFT

WIDTHS = (1, 4, LONGEST_DRAFT + 1)
"""Rows of a request in a pass: its newest token and its drafts. Each divides the greatest, and so the size of each
graph."""


def graph_widths(configuration: Any) -> tuple[int, ...]:
    """Return the rows that each request may have in a pass with drafts; empty if a pass needs no equal numbers.

    Args:
        configuration: vLLM's configuration, after its engine has started.
    """
    mode = configuration.compilation_config.cudagraph_mode
    return WIDTHS if mode is not None and mode.separate_routine() and mode.decode_mode() == mode.FULL else ()


def capture_widths(runner: Any) -> None:
    """Have a model runner of vLLM capture graphs for each width, and find them again.

    Args:
        runner: vLLM's model runner, before it knows its graphs.
    """
    dispatcher = runner.cudagraph_dispatcher
    longest = runner.uniform_decode_query_len
    initialize, capture = dispatcher.initialize_cudagraph_keys, runner._warmup_and_capture
    determine = runner._determine_batch_execution_and_padding

    @contextmanager
    def each_has(width: int) -> Iterator[None]:
        before = runner.uniform_decode_query_len
        runner.uniform_decode_query_len = dispatcher.uniform_decode_query_len = width
        try:
            yield
        finally:
            runner.uniform_decode_query_len = dispatcher.uniform_decode_query_len = before

    def initialize_each(mode: Any, uniform_decode_query_len: int = longest) -> None:
        for width in WIDTHS:
            with each_has(width):
                initialize(mode, width)

    def capture_one(graph: Any, *arguments: Any, **named: Any) -> None:
        with each_has(graph.num_tokens // graph.num_reqs if graph.uniform else longest):
            capture(graph, *arguments, **named)

    def determine_one(
        num_tokens: int, num_reqs: int, num_scheduled_tokens_np: Any, max_num_scheduled_tokens: int, **named: Any
    ) -> Any:
        with each_has(max_num_scheduled_tokens if max_num_scheduled_tokens in WIDTHS else longest):
            return determine(num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, **named)

    dispatcher.initialize_cudagraph_keys = initialize_each
    runner._warmup_and_capture = capture_one
    runner._determine_batch_execution_and_padding = determine_one
