"""Passes that are recorded once and launched as one. The conformance tests show on a GPU that they compute the same."""

import logging
from collections.abc import Callable

import pytest
import torch

from rlhfless_functions.generation.engines.pass_graphs import PassGraphs, Tensors


class Passes:
    """Notes what is computed, recorded and replayed."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.recording = False

    def compute(self, rows: int, window: int) -> Tensors:
        if not self.recording:
            self.done.append(f"compute {rows} {window}")
        return (torch.tensor([rows, window]),)

    def capture(self, compute: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
        self.recording = True
        outputs = compute()
        self.recording = False
        name = "replay {} {}".format(*outputs[0].tolist())
        return lambda: self.done.append(name), outputs


def test_a_pass_is_launched_by_kernels_first_and_then_as_a_graph() -> None:
    passes = Passes()
    graphs = PassGraphs(passes.compute, passes.capture)
    for rows, window in [(4, 256), (4, 256), (4, 512), (4, 256), (2, 512), (4, 512)]:
        (output,) = graphs(rows, window)
        assert output.tolist() == [rows, window]
    assert passes.done == [
        "compute 4 256", "replay 4 256", "compute 4 512", "replay 4 256", "compute 2 512", "replay 4 512",
    ]  # fmt: skip


def test_a_model_whose_passes_cannot_be_recorded_goes_on_kernel_by_kernel(caplog: pytest.LogCaptureFixture) -> None:
    passes, tries = Passes(), []

    def refused(compute: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = PassGraphs(passes.compute, refused)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert graphs(4, 256)[0].tolist() == [4, 256]
        graphs(8, 256), graphs(8, 256)
    assert passes.done == ["compute 4 256"] * 4 + ["compute 8 256"] * 2
    assert len(tries) == 1 and "launched one by one: operation not permitted" in caplog.text
