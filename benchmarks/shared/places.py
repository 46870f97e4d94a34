"""Folders of this repository that benchmarks read and write."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARKS = REPOSITORY / "benchmarks"
QUICKSTART = REPOSITORY / "examples" / "quickstart"
TOOLS = REPOSITORY / "examples" / "tools"
