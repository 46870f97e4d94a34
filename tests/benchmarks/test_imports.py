"""Every script of every room can be imported: what it takes from the product and from other scripts is there."""

from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROOMS = sorted(folder.name for folder in BENCHMARKS.iterdir() if any(folder.glob("*.py")))
HEAVY = {"drafting", "gpu", "learner", "peers"}
"""Rooms that import torch, transformers or TRL."""


@pytest.mark.parametrize(
    "room", [pytest.param(room, marks=[pytest.mark.slow] if room in HEAVY else []) for room in ROOMS]
)
def test_scripts_can_be_imported(room: str) -> None:
    for script in sorted((BENCHMARKS / room).glob("*.py")):
        import_module(f"benchmarks.{room}.{script.stem}")
