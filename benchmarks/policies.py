"""Every policy on every scenario, and everything that the figures rest on: the tables of docs/simulation.md.

    python benchmarks/policies.py [--seeds 5] [--sections scenarios options sensitivity]

The same as `rlhfless simulate --all --out benchmarks/results/policies.json`, and then writes the tables into the page.
A study that was interrupted goes on from the file; delete it to start over.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhfless_operator.simulator.simulate import table
from rlhfless_operator.simulator.study import SECTIONS, Part, study
from rlhfless_operator.simulator.tables import write_tables

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Every policy on every scenario.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS))
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "policies.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "simulation.md")
    arguments = parser.parse_args()
    console = Console()

    def show(part: Part, result: dict[str, Any]) -> None:
        console.print(f"{part.section}: {part.name}", highlight=False)
        if part.section != "limits":
            console.print(table(result))

    results = study(arguments.json, range(arguments.seeds), sections=arguments.sections, on_part=show)
    write_tables(results, arguments.page)


if __name__ == "__main__":
    main()
