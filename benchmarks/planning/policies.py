"""Every policy on every scenario, and everything that the figures rest on: the tables of docs/research/simulation.md.

    python benchmarks/planning/policies.py [--seeds 5] [--sections scenarios options sensitivity]

Prints a table as soon as it is done, and writes all of them into the page at the end (`--no-page` leaves it as it is).
A study that was interrupted goes on from its file; delete it to start over.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.planning.policy_study import SECTIONS, Part, study
from benchmarks.planning.policy_tables import write_tables
from benchmarks.shared.places import BENCHMARKS, REPOSITORY
from rlhfless_operator.simulator.simulate import table


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Every policy on every scenario.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--json", type=Path, default=BENCHMARKS / "planning" / "results" / "policies.json")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs" / "research" / "simulation.md")
    parser.add_argument("--no-page", dest="page", action="store_const", const=None, help="write no tables into a page")
    arguments = parser.parse_args()
    console = Console()

    def show(part: Part, result: dict[str, Any]) -> None:
        console.print(f"{part.section}: {part.name}", highlight=False)
        if part.section != "limits":
            console.print(table(result))

    results = study(arguments.json, range(arguments.seeds), sections=arguments.sections, on_part=show)
    if arguments.page is not None:
        write_tables(results, arguments.page)


if __name__ == "__main__":
    main()
