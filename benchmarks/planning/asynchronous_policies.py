"""Synchronous and asynchronous systems on every scenario of the simulator, and beside published figures.

    python benchmarks/planning/asynchronous_policies.py [--seeds 1] [--steps 24]
        [--scenarios NAME ...] [--again SYSTEM ...]

Simulated. Each system has the split of the GPUs that serves it best in the first steps of the first seed. Prints a
table as soon as it is done, and writes all of them into docs/research/asynchronous.md at the end (`--no-page` leaves it
as it is). Interrupted, it goes on from its file. `--again` runs some systems anew, and keeps the file's rows of the
others. `--systems` runs fewer; the synchronous policies are then static actors alone.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks.planning.policy_tables import write_tables
from benchmarks.shared.places import BENCHMARKS, REPOSITORY
from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.planner.latency.roofline import H100, QWEN_7B, Gpu, ModelShape
from rlhfless_operator.simulator.asynchronous.bound import whole_cluster_seconds
from rlhfless_operator.simulator.asynchronous.compare import (
    SYNCHRONOUS,
    compare,
    run_synchronous,
    run_system,
    table,
)
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS, Split
from rlhfless_operator.simulator.asynchronous.work import draw_steps
from rlhfless_operator.simulator.policies import COMPLETE
from rlhfless_operator.simulator.scenarios import SCENARIOS, STUDIED, Scenario
from rlhfless_operator.simulator.traces import LengthStatistics

H20 = Gpu("H20", 148e12, 4000e9, 96e9, 64e9)
"""By its data sheet."""
QWEN_1_5B = ModelShape("Qwen2.5-1.5B", 1.54e9, 28_672, 28)
_BATCH: dict[str, Any] = {
    "algorithm": "grpo",
    "prompts_per_step": 512,
    "samples_per_prompt": 16,
    "steps_per_epoch": 1,
    "gpu_hour": 1.0,
    "gpus_per_instance": 1,
}
VERL = Scenario(
    name="verl, Qwen2.5-Math-7B, H20, 28k",
    model=QWEN_7B,
    gpu=H20,
    gpus=32,
    # Not published. So generation takes as long as was measured on 64 and 128 GPUs, within a seventh.
    lengths=LengthStatistics(median=800, longest=28_672, runaways=0.002),
    epochs=1,
    **_BATCH,
)
AREAL = Scenario(
    name="AReaL, R1-Distill-Qwen-1.5B, 128 × H800, 27k",
    model=QWEN_1_5B,
    gpu=H100,
    gpus=128,
    lengths=LengthStatistics(median=6000, longest=27_648, runaways=0.05),
    epochs=1,
    **_BATCH,
)


@dataclass(frozen=True)
class Published:
    """Seconds that a peer measured."""

    gpus: int
    synchronous: float
    """A step."""
    learning: float
    """Of which the update, and"""
    old_policy: float
    """the pass of the old policy, which its asynchronous one leaves out."""
    asynchronous_learning: float
    """The update where half of the GPUs learn."""
    asynchronous: dict[str, float]
    """A step of the asynchronous one, by its threshold."""


VERL_PUBLISHED = (
    Published(32, 790.10, 269.80, 107.71, 313.81, {"0.5": 294.77}),
    Published(64, 365.28, 133.41, 70.26, 156.98, {"0.5": 189.26}),
    Published(128, 356.30, 113.81, 53.92, 113.16, {"0": 231.34, "0.1": 171.30, "0.3": 146.11, "0.5": 150.63}),
)
"""verl, docs/advance/fully_async.md: "Asynchronous Training on 7B Model" and "128-card Stale Ablation Experiment"."""
AREAL_PUBLISHED = {"synchronous": 41.0 * 3.6, "asynchronous": 14.8 * 3.6}
"""AReaL, arXiv 2505.24298: hours of 1,000 steps, 1.5B on 16 nodes, as seconds of a step."""


def at_utilisation(scenario: Scenario, tokens: float, learning: float, preparation: float | None) -> Scenario:
    """The scenario with stages that take as long as a peer's, on all of its GPUs; no preparation if None."""
    update = scenario.update_seconds
    own = scenario.learning_gpu_seconds(tokens) / scenario.gpus
    changes = {"training_utilisation": scenario.training_utilisation * own / (learning - update)}
    if preparation is None:
        changes["preparation_utilisation"] = 1e9
    else:
        own = scenario.preparation_gpu_seconds(tokens) / scenario.gpus
        changes["preparation_utilisation"] = scenario.preparation_utilisation * own / preparation
    return replace(scenario, **changes)


def beside_verl(published: Published, steps: int = 8) -> dict[str, Any]:
    """verl's fully asynchronous policy on half of the GPUs, with a learner that scales and with the measured one.

    Returns:
        Seconds of a step, measured and simulated: `{"gpus", "synchronous": {"measured", "simulated"}, "asynchronous":
        [{"what", "measured", "simulated"}]}`.
    """
    scenario = replace(VERL, gpus=published.gpus, epochs=steps)
    trace = scenario.draw_trace(0)
    tokens = float((trace.prompt_tokens[:, None] + trace.response_tokens[0]).sum())
    half = scenario.instances // 2
    split = Split(half, half, scenario.max_batch)
    synchronous = at_utilisation(scenario, tokens, published.learning, published.old_policy)
    rows = []
    # A learner that scales takes twice as long on half of the GPUs; verl's did not.
    for learner, whole in (("that scales", published.learning), ("as measured", published.asynchronous_learning / 2)):
        setting = at_utilisation(scenario, tokens, whole, None)
        for threshold, measured in published.asynchronous.items():
            system = replace(SYSTEMS["verl-async"], ahead=float(threshold))
            seconds = run_system(setting, system, split, trace, 0, steps).seconds / steps
            what = f"threshold {threshold}, a learner {learner}"
            rows.append({"what": what, "measured": measured, "simulated": seconds})
    return {
        "gpus": published.gpus,
        "synchronous": {
            "measured": published.synchronous,
            "simulated": fmean(step.seconds for step in run_synchronous(synchronous, "static", trace, 0, steps)),
        },
        "asynchronous": rows,
    }


def beside_areal(steps: int = 16) -> dict[str, Any]:
    """AReaL at its split of three to one, beside static actors on all GPUs; the form is that of `beside_verl`."""
    scenario = replace(AREAL, epochs=steps)
    trace = scenario.draw_trace(0)
    split = Split(96, 32, scenario.max_batch)
    rows = [
        {
            "what": name,
            "measured": AREAL_PUBLISHED["asynchronous"],
            "simulated": run_system(scenario, SYSTEMS[name], split, trace, 0, steps).seconds / steps,
        }
        for name in ("areal-1", "areal-4")
    ]
    static = run_synchronous(scenario, "static", trace, 0, steps)
    batches = list(islice(draw_steps(scenario, trace, 0), steps))
    return {
        "gpus": scenario.gpus,
        # That anyone needs at AReaL's staleness, with perfect splits and groups in any order.
        "least": whole_cluster_seconds(scenario, batches, 4, regroups=True) / steps,
        "synchronous": {
            "measured": AREAL_PUBLISHED["synchronous"],
            "simulated": fmean(step.seconds for step in static),
        },
        "asynchronous": rows,
    }


def rows_again(before: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """A result with some rows of a fresh one in place of its own, in the order of all systems."""
    rows = {row["policy"]: row for result in (before, fresh) for row in result["policies"]}
    names = [name for name in (*SYNCHRONOUS, COMPLETE, *SYSTEMS) if name in rows]
    return {**before, "policies": [rows[name] for name in names]}


def study(
    path: Path | None,
    names: Sequence[str],
    seeds: int,
    steps: int,
    console: Console,
    again: Sequence[str] = (),
    few: Sequence[str] = (),
) -> dict[str, Any]:
    """Run what is not in the file yet and what is to be run again, and write the file after each scenario."""
    done: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    done = {
        **described_run(["numpy"]),
        "asynchronous": done.get("asynchronous", {}),
        "published": done.get("published", {}),
    }

    def keep() -> None:
        write_record(done, path)

    for name in names:
        if name not in done["asynchronous"]:
            systems = {system: SYSTEMS[system] for system in few or SYSTEMS}
            synchronous = SYNCHRONOUS[:1] if few else SYNCHRONOUS
            done["asynchronous"][name] = compare(
                SCENARIOS[name], range(seeds), steps=steps, systems=systems, synchronous=synchronous
            )
            keep()
        elif again:
            systems = {system: SYSTEMS[system] for system in again}
            fresh = compare(SCENARIOS[name], range(seeds), steps=steps, systems=systems, synchronous=SYNCHRONOUS[:1])
            done["asynchronous"][name] = rows_again(done["asynchronous"][name], fresh)
            keep()
        console.print(table(done["asynchronous"][name]))
    for published in VERL_PUBLISHED:
        name = f"{VERL.name}, {published.gpus} GPUs"
        if name not in done["published"]:
            done["published"][name] = beside_verl(published)
            keep()
        console.print(name, done["published"][name])
    if AREAL.name not in done["published"]:
        done["published"][AREAL.name] = beside_areal()
        keep()
    console.print(AREAL.name, done["published"][AREAL.name])
    return done


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Synchronous and asynchronous systems on every scenario.")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--scenarios", nargs="*", choices=list(SCENARIOS), default=list(STUDIED))
    parser.add_argument("--systems", nargs="*", choices=list(SYSTEMS), default=[])
    parser.add_argument("--again", nargs="*", choices=list(SYSTEMS), default=[])
    parser.add_argument("--json", type=Path, default=BENCHMARKS / "planning" / "results" / "async_policies.json")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs" / "research" / "asynchronous.md")
    parser.add_argument("--no-page", dest="page", action="store_const", const=None, help="write no tables into a page")
    arguments = parser.parse_args()
    console = Console()
    done = study(
        arguments.json,
        arguments.scenarios,
        arguments.seeds,
        arguments.steps,
        console,
        arguments.again,
        arguments.systems,
    )
    if arguments.page is not None:
        write_tables({name: done[name] for name in ("asynchronous", "published")}, arguments.page)


if __name__ == "__main__":
    main()
