"""Comparisons with another library's code, which remember how large the differences were.

`benchmarks/peers/correctness.py` runs the tests that make them, and writes what is remembered into
docs/research/correctness.md.
"""

import torch

LARGEST: dict[str, float] = {}
"""Largest absolute difference by what was compared."""


def assert_same(
    check: str, ours: torch.Tensor, theirs: torch.Tensor, *, rtol: float = 1e-10, atol: float = 1e-12
) -> None:
    """That two results are equal within a tolerance, and a note of how far apart they are.

    Args:
        check: what is compared, as the page lists it.
        ours: any shape.
        theirs: same shape.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda text: f"{check}: {text}")
    difference = (ours.double() - theirs.double()).abs().max().item() if ours.numel() else 0.0
    LARGEST[check] = max(LARGEST.get(check, 0.0), difference)
