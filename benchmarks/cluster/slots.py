"""Jobs that take turns on slots: time to the end of all, and how busy the slots are.

    KUBEBUILDER_ASSETS=... python benchmarks/cluster/slots.py [--jobs 1 2 4] [--steps 5]
        [--time-scale 0.2] [--json FILE]

Whole jobs go through the operator: driver, pool, slots, Knative's Services, webhook, ledger. The API server is real
(from KUBEBUILDER_ASSETS, the convention of envtest), Knative is emulated, and each pod is a process that rehearses on
an emulated GPU. The jobs have the lengths of a scenario of the simulator, each drawn anew. They run

- one after the other, each with all slots to itself;
- in turns: all at once on all slots;
- apart: all at once, each on an equal part of the slots, which no other job uses.

All seconds in the results are emulated ones. This machine's own time is in them, divided by the time scale.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster.emulated_cluster import Setting, emulated_cluster, job_of, wait_for_ends
from benchmarks.cluster.slot_timeline import Timeline
from benchmarks.shared.records import described_run, write_record
from tests.clusters.control_plane import ApiServer
from tests.controller.operator_harness import job_server
from tests.prerequisites import HAS_API_SERVER

_HOW = ("alone", "in turns", "apart")


async def run_jobs(server: ApiServer, folder: Path, setting: Setting, count: int, how: str) -> dict[str, Any]:
    """Run so many jobs at once to their ends; all seconds are emulated ones.

    Args:
        how: on the same slots (`in turns`), each on its part of them (`apart`), or each on as many slots of its own as
            there are (`alone`): emulated GPUs cost nothing.
    """
    part = setting.part(count) if how == "apart" else setting
    names = [f"job-{number}" for number in range(count)]
    # The claims of an earlier run's pools would count as those of jobs that the operator has not found yet.
    run = f"{how.replace(' ', '-')}-{count}"
    pool_of = {name: run if how == "in turns" else f"{run}-{name}" for name in names}
    timeline = Timeline()
    async with emulated_cluster(server, folder, dict.fromkeys(pool_of.values(), part.pool()), timeline) as jobs:
        begun = time.monotonic()
        for number, name in enumerate(names):
            await asyncio.to_thread(jobs.apply, job_of(number, part, folder, pool_of[name], name))
        ends = await wait_for_ends(jobs, names)
    scale = setting.time_scale
    seconds = {name: (end - begun) / scale for name, end in ends.items()}
    if how == "alone":
        shares = {name: timeline.shares(setting.slots, begun, end, job=name) for name, end in ends.items()}
        return {"seconds": seconds, "shares": shares}
    # From when all jobs are past their first batch until the first one has ended.
    middle = max(timeline.first_work(name, "learning") for name in names), min(ends.values())
    return {
        "seconds": seconds,
        "shares": timeline.shares(setting.slots, begun, max(ends.values())),
        "shares_while_all_work": timeline.shares(setting.slots, *middle),
        "changes_of_hands": timeline.changes_of_hands(scale),
        "pods": timeline.pods,
        "spans": timeline.document(begun, scale),
    }


def summary(runs: dict[str, Any], counts: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of the table."""
    alone, rows = runs["alone"], []
    for count in counts:
        names = [f"job-{number}" for number in range(count)]
        sequence = sum(alone["seconds"][name] for name in names)
        busy = sum(alone["seconds"][name] * alone["shares"][name]["busy"] for name in names) / sequence
        rows.append({"jobs": count, "how": "one after the other", "seconds": sequence, "busy": busy})
        for how in ("in turns", "apart"):
            if (run := runs.get(f"{count} {how}")) is None:
                continue
            seconds = max(run["seconds"].values())
            rows.append(
                {
                    "jobs": count,
                    "how": how,
                    "seconds": seconds,
                    "busy": run["shares"]["busy"],
                    "switching": run["shares"]["switching"],
                    "busy_while_all_work": run["shares_while_all_work"]["busy"],
                    "switching_while_all_work": run["shares_while_all_work"]["switching"],
                    "times_as_fast": sequence / seconds,
                    "longest_against_alone": max(run["seconds"][name] / alone["seconds"][name] for name in names),
                }
            )
    return rows


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for the terminal."""
    columns = ("busy", "switching", "busy_while_all_work", "switching_while_all_work")
    table = Table("jobs", "how", "seconds", *(each.replace("_", " ") for each in columns), "times as fast", "/ alone")
    for row in rows:
        table.add_row(
            str(row["jobs"]),
            row["how"],
            f"{row['seconds']:.0f}",
            *(f"{row[name]:.1%}" if name in row else "" for name in columns),
            f"{row.get('times_as_fast', 1.0):.2f}",
            f"{row['longest_against_alone']:.2f}" if "longest_against_alone" in row else "",
        )
    return table


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Jobs that take turns on slots.")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4], help="how many jobs at a time")
    parser.add_argument("--scenario", default="paper-3b-gsm8k-grpo", help="of the simulator: model, GPU, lengths")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--learner-gpus", type=int, default=2, help="GPUs of a learner, and of a group of slots")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--startup", type=float, default=10.0, help="emulated seconds in which a pod starts")
    parser.add_argument("--time-scale", type=float, default=0.2, help="seconds here for each emulated second")
    parser.add_argument("--only", choices=_HOW, nargs="+", default=_HOW, help="leaves the others out")
    parser.add_argument("--json", type=Path, default=None, help="file for the results")
    parser.add_argument("--spans", type=Path, default=None, help="file for what each pod did when, in the last run")
    given = parser.parse_args()
    if not HAS_API_SERVER:
        raise SystemExit("KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver; see setup-envtest")
    setting = Setting(given.scenario, given.slots, given.learner_gpus, given.steps, given.startup, given.time_scale)
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="slots-") as name, job_server(Path(name)) as server:
        os.environ["KUBECONFIG"] = str(server.kubeconfig)
        for what, count, how in _runs(given.jobs, given.only):
            runs[what] = asyncio.run(run_jobs(server, Path(name), setting, count, how))
            spans = runs[what].pop("spans", [])
            print(what, json.dumps(runs[what]), file=sys.stderr, flush=True)
            rows = summary(runs, given.jobs) if "alone" in runs else []
            document = described_run(["rlhfless", "kubernetes", "kopf"]) | {"setting": vars(setting)}
            write_record({**document, "run": what, "spans": spans}, given.spans)
            write_record({**document, "summary": rows, "runs": runs}, given.json)
    if rows:
        Console().print(table_of(rows))


def _runs(counts: Sequence[int], only: Sequence[str]) -> list[tuple[str, int, str]]:
    """Name, number of jobs and how they are carried out."""
    runs = [("alone", max(counts), "alone")]
    runs += [(f"{count} {how}", count, how) for count in counts if count > 1 for how in ("in turns", "apart")]
    return [run for run in runs if run[2] in only]


if __name__ == "__main__":
    main()
