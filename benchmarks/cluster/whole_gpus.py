"""Jobs that share GPUs which pods hold whole, where pods take long to start and to go: time to the end of all.

    KUBEBUILDER_ASSETS=... python benchmarks/cluster/whole_gpus.py [--jobs 3] [--gpus 4] [--steps 8] [--json FILE]

As in `slots.py` whole jobs go through the operator, the API server is real, Knative is emulated, and each pod is a
process that rehearses on an emulated GPU. A GPU is its pod's until the pod is gone: the cluster never has more pods
than GPUs. The jobs run

- alone: the first one, with all GPUs to itself;
- one after the other: each begins when the one before has succeeded;
- together: all at once, each pod with a GPU of its own;
- in turns: all at once, on the same GPUs as slots (claims).

All seconds in the results are emulated ones. This machine's own time is in them, divided by the time scale.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster.emulated_cluster import Setting, emulated_cluster, job_of, wait_for_ends
from benchmarks.cluster.slot_timeline import Timeline
from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from tests.clusters.control_plane import ApiServer
from tests.controller.operator_harness import job_server
from tests.prerequisites import HAS_API_SERVER

_HOW = ("alone", "one after the other", "together", "in turns")
_STATES = ("starting", "busy", "idle", "switching", "draining")


async def run_jobs(
    server: ApiServer, folder: Path, setting: Setting, drain: float, count: int, how: str
) -> dict[str, Any]:
    """Run so many jobs to their ends; all seconds are emulated ones.

    Args:
        drain: emulated seconds from a pod's deletion until its GPU is free.
        how: one of `_HOW`.
    """
    names = [f"job-{number}" for number in range(1 if how == "alone" else count)]
    pool = PoolSettings(gpus=setting.slots, device_class="gpu.rehearsal" if how == "in turns" else None)
    timeline, scale = Timeline(), setting.time_scale
    batches = [[name] for name in names] if how == "one after the other" else [names]
    ends: dict[str, float] = {}
    async with emulated_cluster(server, folder, {"default": pool}, timeline, drain=drain * scale) as jobs:
        begun = time.monotonic()
        for batch in batches:
            for name in batch:
                number = names.index(name)
                document = job_of(number, setting, folder, "default", name)
                document["spec"]["generation"]["instances"] = {"min": 1, "max": 2}
                await asyncio.to_thread(jobs.apply, document)
            ends |= await wait_for_ends(jobs, batch)
    seconds: Counter[str] = Counter()
    for span in timeline.spans:
        seconds[span.state] += (span.end - span.start) / scale
    return {
        "seconds": {name: round((end - begun) / scale, 1) for name, end in ends.items()},
        "instance_seconds": {state: round(seconds[state], 1) for state in _STATES},
        "pods": timeline.pods,
    }


def table_of(runs: dict[str, Any]) -> Table:
    """All runs for the terminal."""
    table = Table("how", "jobs", "seconds to the end of all", "of one after the other", "pods", *_STATES)
    sequence = runs.get("one after the other", {}).get("seconds", {})
    for how, run in runs.items():
        end = max(run["seconds"].values())
        part = f"{end / max(sequence.values()):.2f}" if sequence and len(run["seconds"]) == len(sequence) else ""
        states = (f"{run['instance_seconds'][state]:.0f}" for state in _STATES)
        table.add_row(how, str(len(run["seconds"])), f"{end:.0f}", part, str(run["pods"]), *states)
    return table


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Jobs that share GPUs which pods hold whole.")
    parser.add_argument("--jobs", type=int, default=3, help="how many jobs")
    parser.add_argument("--scenario", default="paper-3b-gsm8k-grpo", help="of the simulator: model, GPU, lengths")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs of the pool")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--startup", type=float, default=40.0, help="emulated seconds in which a pod starts")
    parser.add_argument("--drain", type=float, default=10.0, help="emulated seconds in which a pod goes")
    parser.add_argument("--time-scale", type=float, default=0.1, help="seconds here for each emulated second")
    parser.add_argument("--only", choices=_HOW, nargs="+", default=_HOW, help="leaves the others out")
    parser.add_argument("--json", type=Path, default=None, help="file for the results; those that it has are kept")
    given = parser.parse_args()
    if not HAS_API_SERVER:
        raise SystemExit("KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver; see setup-envtest")
    setting = Setting(
        given.scenario, given.gpus, 1, given.steps, given.startup, given.time_scale, prompts=given.prompts
    )
    before = json.loads(given.json.read_text())["runs"] if given.json is not None and given.json.exists() else {}
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="whole-gpus-") as name, job_server(Path(name)) as server:
        os.environ["KUBECONFIG"] = str(server.kubeconfig)
        for how in _HOW:
            if how in given.only:
                runs[how] = asyncio.run(run_jobs(server, Path(name), setting, given.drain, given.jobs, how))
                print(how, json.dumps(runs[how]), file=sys.stderr, flush=True)
            elif how in before:
                runs[how] = before[how]
            document = described_run(["rlhfless", "kubernetes", "kopf"])
            document["setting"] = vars(setting) | {"drain": given.drain}
            write_record({**document, "runs": runs}, given.json)
    Console().print(table_of(runs))


if __name__ == "__main__":
    main()
