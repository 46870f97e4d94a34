"""Decode passes as CUDA graphs.

A pass is hundreds of small kernels, and a host takes longer to launch them one by one than a GPU to compute them. A
graph launches all of them at once. It computes a fixed number of rows and a fixed window, from the run's own tensors.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

GRAPH_TOKENS = 256
"""Attention of a pass that may be a graph reads a multiple of this many tokens. A longer window costs little beside a
graph for every block."""

logger = logging.getLogger(__name__)

Tensors = tuple[torch.Tensor, ...]
Compute = Callable[[int, int], Tensors]
"""Computes a pass of so many rows and such a window, on the device alone."""
Capture = Callable[[Callable[[], Tensors]], tuple[Callable[[], object], Tensors]]
"""Records a pass without computing it. Returns what computes it, and the tensors that it fills."""


class _Graph(NamedTuple):
    replay: Callable[[], object]
    outputs: Tensors


class PassGraphs:
    """Passes of one run, the same over and over.

    A pass is launched kernel by kernel the first time, which also prepares all kernels, and recorded the second time.
    If a model's pass cannot be recorded, it is launched kernel by kernel as before.

    Args:
        compute: the pass. It reads and writes tensors that stay where they are.
        capture: records it.
    """

    def __init__(self, compute: Compute, capture: Capture) -> None:
        self._compute = compute
        self._capture = capture
        self._graphs: dict[tuple[int, int], _Graph | None] = {}
        """None for a pass that was computed once."""
        self._able = True

    def __call__(self, rows: int, window: int) -> Tensors:
        """Compute a pass. What it returns is overwritten by the next one."""
        key = rows, window
        if key not in self._graphs or not self._able:
            self._graphs[key] = None
            return self._compute(rows, window)
        graph = self._graphs[key]
        if graph is None:
            try:
                graph = self._graphs[key] = _Graph(*self._capture(lambda: self._compute(rows, window)))
            except RuntimeError as error:
                self._able = False
                logger.warning("passes can't be CUDA graphs, and their kernels are launched one by one: %s", error)
                return self._compute(rows, window)
        graph.replay()
        return graph.outputs


def cuda_capture() -> Capture:
    """Return what records passes as CUDA graphs that share their memory."""
    pool: Any = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()

    def capture(compute: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = compute()
        return graph.replay, outputs

    return capture
