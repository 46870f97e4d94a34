"""The settings where the published gains of RLHFless over static actors come out, and ours at the same settings.

    python benchmarks/planning/paper_figures.py [--seeds 1] [--prompts 64 128 256 512]

The paper says 1.35 times as fast and 44.8 % cheaper on its best case (Qwen2.5-3B, GSM8K, GRPO, 16 L40S). It does not
say how large a batch is, how many GPUs the static actors have, how well learning uses the hardware, nor how long an
actor takes to wake. This searches all four, and runs ours at the nearest settings. Interrupted, or given some of the
batches at a time, it goes on from its file.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shared.places import BENCHMARKS
from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.simulator.policies import COMPLETE, POLICIES, PolicySettings, find_policy
from rlhfless_operator.simulator.scenarios import SCENARIOS, Scenario
from rlhfless_operator.simulator.simulate import simulate_variants

PUBLISHED_SPEED, PUBLISHED_SAVING = 1.35, 0.448
BATCHES = (64, 128, 256, 512)
"""Prompts of 8 samples each."""
UTILISATIONS = (0.2, 0.35, 0.5)
GPUS = (8, 16)
"""The setting has two machines of 8."""
WAKES = (0.5, 2.0, 6.0)
"""Seconds."""
SPLITS = (1.0, 0.75, 0.5, 0.25)
"""Part of the GPUs on which static actors generate. The others learn only; at 1, all do both."""
NEAREST = 4
Known = dict[str, list[float]]
"""[seconds, GPU-seconds] of a step by policy and setting."""


@dataclass(frozen=True)
class Setting:
    """What is not published."""

    prompts: int
    utilisation: float
    gpus: int
    wake_seconds: float
    split: float

    def scenario(self) -> Scenario:
        """The best case of the paper with this setting."""
        best = SCENARIOS["paper-3b-gsm8k-grpo"]
        return replace(
            best,
            prompts_per_step=self.prompts,
            training_utilisation=self.utilisation,
            preparation_utilisation=self.utilisation / best.training_utilisation * best.preparation_utilisation,
            gpus=self.gpus,
            startup_seconds=self.wake_seconds,
            steps_per_epoch=1,
            epochs=2,
        )

    def static(self) -> PolicySettings:
        """Static actors on their part of the GPUs."""
        return replace(POLICIES["static"], generating_share=self.split)


def distance(speed: float, saving: float) -> float:
    """How far figures are from those published: the sum of both ratios' distances from 1."""
    return abs(speed / PUBLISHED_SPEED - 1) + abs((1 - saving) / (1 - PUBLISHED_SAVING) - 1)


def figures(known: Known, policy: str, setting: Setting, seeds: Sequence[int]) -> list[float]:
    """A policy's step after the first epoch, as far as it is not known yet."""
    # Static actors are not woken, and the others have no split.
    alike = replace(setting, wake_seconds=0.0) if policy == "static" else replace(setting, split=1.0)
    key = f"{policy}: {asdict(alike)}, {len(seeds)} seeds"
    if key not in known:
        settings = setting.static() if policy == "static" else find_policy(policy)
        (row,) = simulate_variants(setting.scenario(), seeds, {policy: settings})["policies"]
        known[key] = [row["seconds"], row["gpu_seconds"]]
    return known[key]


def search(known: Known, prompts: Sequence[int], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The paper's policy beside static actors at every setting, the nearest to the published figures first."""
    rows = []
    for values in itertools.product(prompts, UTILISATIONS, GPUS, WAKES, SPLITS):
        setting = Setting(*values)
        found = [figures(known, policy, setting, seeds) for policy in ("static", "paper")]
        rows.append(asdict(setting) | beside(*found))
    return sorted(rows, key=lambda row: distance(row["speed"], row["saving"]))


def beside(static: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How another compares with static actors, each (seconds, GPU-seconds)."""
    return {
        "static_seconds": static[0],
        "static_gpu_seconds": static[1],
        "seconds": other[0],
        "gpu_seconds": other[1],
        "speed": static[0] / other[0],
        "saving": 1 - other[1] / static[1],
    }


def with_ours(known: Known, row: dict[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """A row with what ours comes to at its setting."""
    setting = Setting(**{name: row[name] for name in Setting.__dataclass_fields__})
    static = row["static_seconds"], row["static_gpu_seconds"]
    return row | {"rlhfless": beside(static, figures(known, COMPLETE, setting, seeds))}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    heading = ("prompts", "GPUs", "generating, static", "utilisation", "wake, s", "static")
    heading += ("paper", "speed", "cheaper by", "ours", "speed", "cheaper by")
    lines = [f"| {' | '.join(heading)} |", f"|{'--:|' * len(heading)}"]
    for row in rows:
        cells = [f"{row['prompts']}", f"{row['gpus']}", f"{row['split']:.0%}", f"{row['utilisation']:g}"]
        cells += [f"{row['wake_seconds']:g}", f"{row['static_seconds']:.1f} s, {row['static_gpu_seconds']:,.0f}"]
        for each in (row, row["rlhfless"]):
            cells += [f"{each['seconds']:.1f} s, {each['gpu_seconds']:,.0f}"]
            cells += [f"{each['speed']:.2f}×", f"{each['saving']:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Search, print the nearest settings, and keep everything."""
    parser = argparse.ArgumentParser(description="Where the paper's figures come out.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--prompts", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--json", type=Path, default=BENCHMARKS / "planning" / "results" / "paper_figures.json")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    known: Known = json.loads(arguments.json.read_text())["figures"] if arguments.json.exists() else {}
    rows = search(known, arguments.prompts, seeds)
    # The nearest of all, and of those where static actors have all GPUs.
    nearest = [with_ours(known, row, seeds) for row in rows[:NEAREST]]
    shared = [row for row in rows if row["split"] == 1.0]
    nearest_shared = [with_ours(known, row, seeds) for row in shared[:NEAREST]]
    print(table(nearest), table(nearest_shared), sep="\n\n")
    result = {
        **described_run(["numpy"]),
        "published": {"speed": PUBLISHED_SPEED, "saving": PUBLISHED_SAVING},
        "seeds": list(seeds),
        "settings": len(rows),
        "nearest": nearest,
        "nearest_where_static_actors_have_all_gpus": nearest_shared,
        "figures": known,
    }
    write_record(result, arguments.json)


if __name__ == "__main__":
    main()
