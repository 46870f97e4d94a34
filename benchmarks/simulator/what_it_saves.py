"""Savings of rlhfless as it ships, in simulation: the rows of README, from its defaults.

    python benchmarks/simulator/what_it_saves.py [--seeds 3] [--json FILE]

Prints each scenario's row, and the paper's best case with each ability that the live loop gets later. If it is
interrupted, it goes on from its file.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared.places import BENCHMARKS
from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.simulator.policies import COMPLETE
from rlhfless_operator.simulator.scenarios import NODE_GPUS, SCENARIOS, STUDIED, USERS, Scenario, on_platform
from rlhfless_operator.simulator.simulate import simulate

RIVALS = ("static", "rlhfuse-resident", "paper-overlap")
WHOLE_BATCH = "rlhfless-whole-batch"
POLICIES = (*RIVALS, WHOLE_BATCH, "rlhfless", COMPLETE)
BEST = SCENARIOS["paper-3b-gsm8k-grpo"]
_STORE_RATE = BEST.model.weight_bytes / NODE_GPUS

Row = dict[str, Any]


def parts(seeds: Sequence[int]) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """Yield (section, name, run): every scenario, and the best case with something changed."""
    for name in (*USERS, *STUDIED):
        section = "users" if name in USERS else "studied"
        yield section, name, lambda name=name: simulate(name, seeds, policies=POLICIES)  # type: ignore[misc]
    variants: dict[str, tuple[dict[str, Any], str]] = {
        "as it ships, on slots": ({}, "rlhfless"),
        "with `learning.overlap: never`": ({}, WHOLE_BATCH),
        "with publishing beside the next step": ({}, "rlhfless+publishing"),
        "with publishing and holding": ({}, COMPLETE),
        "as it ships, publishing in 6 s": ({"store_rate": _STORE_RATE / 6}, "rlhfless"),
        "as it ships, publishing in 12 s": ({"store_rate": _STORE_RATE / 12}, "rlhfless"),
    }
    for words, (changes, policy) in variants.items():
        scenario = replace(BEST, **changes)
        yield "best case", words, _against_static(scenario, seeds, policy)
    for platform in ("pods", "processes"):
        scenario = on_platform(BEST, platform)
        for words, policy in (
            (f"as it ships, on {platform}", "rlhfless"),
            (f"with `learning.overlap: never`, on {platform}", WHOLE_BATCH),
            (f"with everything, on {platform}", COMPLETE),
        ):
            yield "best case", words, _against_static(scenario, seeds, policy)


def _against_static(scenario: Scenario, seeds: Sequence[int], policy: str) -> Callable[[], Row]:
    return lambda: simulate(scenario, seeds, policies=("static", policy))


def compared(result: Row, policy: str) -> tuple[float, float, float, float]:
    """Return a policy beside static actors: speed and saving, then those of the first epoch."""
    rows = {row["policy"]: row for row in result["policies"]}
    static, own = rows["static"], rows[policy]
    found = []
    for a, b in ((static, own), (static["first_epoch"], own["first_epoch"])):
        found += [a["seconds"] / b["seconds"], 1 - b["gpu_seconds"] / a["gpu_seconds"]]
    return found[0], found[1], found[2], found[3]


def words_of(figures: Sequence[float]) -> str:
    """Return speeds and savings for a table."""
    speed, saving, first_speed, first_saving = figures
    return f"{first_speed:.2f}×, {first_saving:.0%}, then {speed:.2f}×, {saving:.0%}"


NAMES = {
    BEST.name: "3B on 16 L40S, 2k tokens: the paper's best case",
    "h100-8-8b-8k": "8B on one node of 8 H100, 8k tokens",
    "h100-32-7b-16k": "7B on 32 H100, 16k tokens",
    "h100-64-32b-32k": "32B on 64 H100, 32k tokens",
}
"""Scenarios in README."""


def readme_rows(done: Row) -> list[str]:
    """Return the rows of README: what ships, in the first epoch and later, beside GPUs that are held all the time."""
    studied = done["studied"]
    rows = {words: compared({**studied, **done["users"]}[name], "rlhfless") for name, words in NAMES.items()}
    every = [compared(result, "rlhfless") for result in studied.values()]
    speed, saving, first_speed, first_saving = (median(column) for column in zip(*every, strict=True))
    rows["median of fourteen scenarios"] = speed, saving, first_speed, first_saving
    return [
        f"| *simulated*: {words} | {first_saving:.0%} fewer GPU-seconds in the first epoch, {saving:.0%} afterwards |"
        f" {first_speed:.2f}, {speed:.2f} |".replace("%", " %")
        for words, (speed, saving, first_speed, first_saving) in rows.items()
    ]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="What rlhfless saves as it ships.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=BENCHMARKS / "simulator" / "results" / "what_it_saves.json")
    arguments = parser.parse_args()
    done: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    done.setdefault("seeds", arguments.seeds)
    for section, name, run in parts(range(done["seeds"])):
        rows = done.setdefault(section, {})
        if name not in rows:
            rows[name] = run()
            write_record({**described_run(["numpy"]), **done}, arguments.json)
        policies = [row["policy"] for row in rows[name]["policies"][1:]]
        print(f"{section}: {name}: beside static actors, first epoch, then")
        for policy in policies:
            print(f"    {policy}: {words_of(compared(rows[name], policy))}", flush=True)
    print("median of the studied scenarios:")
    for policy in POLICIES[1:]:
        figures = [compared(result, policy) for result in done["studied"].values()]
        print(f"    {policy}: {words_of([median(column) for column in zip(*figures, strict=True)])}")
    print("\n".join(readme_rows(done)))


if __name__ == "__main__":
    main()
