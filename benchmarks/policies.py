"""Every policy on every scenario: the table of docs/simulation.md.

    python benchmarks/policies.py [SCENARIO ...] [--seeds 5] [--cost-weight 0.5] [--json FILE]

Prints a table for each scenario as it is done, and writes all of them as JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from rlhfless_operator.simulator.scenarios import SCENARIOS
from rlhfless_operator.simulator.simulate import ablate, simulate, sweep, table

SWEEPS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("cost_weight", (0.05, 0.2, 0.4, 0.6, 0.8)),
    ("prompts_per_step", (64, 256, 640)),
    ("lengths.runaways", (0.0, 0.01, 0.05)),
    ("lengths.noise", (0.1, 0.25, 0.5)),
    ("startup_seconds", (0.5, 6.0, 30.0)),
)
"""What the first scenario is swept over with --sweeps."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Every policy on every scenario.")
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), help="all if left out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cost-weight", type=float, default=None, help="λ instead of the scenarios' own")
    parser.add_argument("--sweeps", action="store_true", help="ablations and sweeps of the first scenario instead")
    parser.add_argument("--json", type=Path, default=None, help="file for all results")
    arguments = parser.parse_args()
    console = Console()
    seeds = range(arguments.seeds)
    results: list[dict[str, Any]] = []
    if arguments.sweeps:
        name = arguments.scenarios[0]
        results.append({"field": "ablation", **ablate(name, list(seeds))})
        console.print(table(results[0]))
        for field, values in SWEEPS:
            for result in sweep(name, field, values, list(seeds), policies=("static", "paper", "rlhfless")):
                console.print(f"{field} = {result['value']}")
                console.print(table(result))
                results.append(result)
                _write(arguments.json, results)
    else:
        for name in track(arguments.scenarios, console=console, description="scenarios"):
            results.append(simulate(name, list(seeds), cost_weight=arguments.cost_weight))
            console.print(table(results[-1]))
            _write(arguments.json, results)
    _write(arguments.json, results)


def _write(path: Path | None, results: list[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
