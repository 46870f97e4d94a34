"""Random small scenarios, and how often a rival is better than ours in both time and cost.

    python benchmarks/planning/dominance.py [--scenarios 120] [--seed 1] [--json FILE]

A rival counts where its means over two traces are lower by more than 2 % in seconds and in GPU-seconds of a step.
"""

import argparse
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.simulator.policies import COMPLETE
from rlhfless_operator.simulator.scenarios import SCENARIOS, Scenario
from rlhfless_operator.simulator.simulate import simulate
from rlhfless_operator.simulator.traces import LengthStatistics

MARGIN = 0.02
RIVALS = ("static", "rlhfuse", "rlhfuse-resident", "paper", "laminar")
FIELDS: dict[str, tuple[Any, ...]] = {
    "gpus": (2, 4, 8),
    "prompts_per_step": (8, 16, 32),
    "samples_per_prompt": (1, 4, 8),
    "max_batch": (32, 256),
    "cost_weight": (0.05, 0.2, 0.5, 0.8, 0.95),
    "startup_seconds": (0.5, 2.0, 6.0),
    "training_utilisation": (0.2, 0.35, 0.5),
}
LENGTHS: dict[str, tuple[Any, ...]] = {
    "median": (60, 150, 400),
    "longest": (600, 1200, 4800),
    "runaways": (0.0, 0.01, 0.05),
    "noise": (0.1, 0.25, 0.5),
}
SMALL = replace(SCENARIOS["paper-3b-gsm8k-grpo"], name="random", steps_per_epoch=1, epochs=3)


def draw(source: random.Random) -> tuple[Scenario, dict[str, Any]]:
    """A scenario, and what it has."""
    fields = {name: source.choice(values) for name, values in FIELDS.items()}
    lengths = {name: source.choice(values) for name, values in LENGTHS.items()}
    return replace(SMALL, lengths=LengthStatistics(**lengths), **fields), fields | lengths


def better_in_both(scenario: Scenario, seeds: int) -> dict[str, tuple[float, float]]:
    """By rival that is: its seconds and GPU-seconds over ours."""
    policies = [*RIVALS, COMPLETE]
    rows = {row["policy"]: row for row in simulate(scenario, range(seeds), policies=policies)["policies"]}
    ours = rows.pop(COMPLETE)
    ratios = {
        name: (row["seconds"] / ours["seconds"], row["gpu_seconds"] / ours["gpu_seconds"]) for name, row in rows.items()
    }
    return {name: found for name, found in ratios.items() if max(found) < 1 - MARGIN}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Whether a rival is better in both time and cost.")
    parser.add_argument("--scenarios", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1, help="of the scenarios")
    parser.add_argument("--traces", type=int, default=2, help="of each scenario")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    count: Counter[str] = Counter()
    rows = []
    for number in range(arguments.scenarios):
        scenario, given = draw(source)
        found = better_in_both(scenario, arguments.traces)
        count.update(list(found))
        if found:
            rows.append({"number": number, "rivals": found, **given})
            ratios = ", ".join(f"{name} {time:.2f} / {cost:.2f}" for name, (time, cost) in found.items())
            print(f"{number}: {ratios}; {given}", flush=True)
    print({name: count[name] for name in RIVALS}, "of", arguments.scenarios)
    about = {"scenarios": arguments.scenarios, "seed": arguments.seed, "traces": arguments.traces}
    write_record({**described_run(["numpy"]), **about, "better": dict(count), "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
