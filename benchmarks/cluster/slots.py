"""Jobs that take turns on slots: time to the end of all, and how busy the slots are.

    KUBEBUILDER_ASSETS=... python benchmarks/cluster/slots.py [--jobs 1 2 4] [--steps 5]
        [--time-scale 0.2] [--json FILE]

Whole jobs go through the operator: driver, pool, slots, Knative's Services, webhook, ledger. The API server is real
(from KUBEBUILDER_ASSETS, the convention of envtest), Knative is emulated, and each pod is a process that rehearses on
an emulated GPU. The jobs have the lengths of a scenario of the simulator, each drawn anew. They are carried out

- one after the other, each with all slots to itself;
- in turns: all at once on all slots;
- apart: all at once, each on an equal part of the slots, which no other job uses.

All seconds in the results are emulated ones. What this machine itself takes is in them, divided by the time scale.
"""

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cluster.slot_timeline import Timeline
from benchmarks.shared.machine import describe_machine
from rlhfless_operator.controller.context import MakePlatform, Tell
from rlhfless_operator.controller.functions import knative_platforms
from rlhfless_operator.controller.main import OpenPlatforms, Operator
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import KnativeClient
from rlhfless_operator.platforms.base import StateChange, StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, PoolSettings
from rlhfless_operator.platforms.pods.manifests import SLOTS
from rlhfless_operator.simulator.scenarios import find_scenario
from rlhfless_operator.simulator.traces import write_trace
from tests.clusters.control_plane import ApiServer
from tests.clusters.knative_definitions import api_client, install
from tests.clusters.knative_emulation import KnativeEmulation
from tests.clusters.rehearsing_functions import rehearsing_functions
from tests.clusters.slot_webhook import giving_slots
from tests.controller.operator_harness import Jobs, fresh_namespace, job_server
from tests.prerequisites import HAS_API_SERVER

_POLL_SECONDS = 0.1
_HOW = ("alone", "in turns", "apart")


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    scenario: str
    slots: int
    learner_gpus: int
    """GPUs of a learner, and of a group of slots."""
    steps: int
    startup: float
    """Emulated seconds in which a pod starts."""
    time_scale: float
    prompts: int | None = None
    """Prompts of a step; the scenario's if left out."""

    def part(self, jobs: int) -> "Setting":
        """One job's, where each of so many has slots of its own."""
        slots = self.slots // jobs
        return replace(self, slots=slots, learner_gpus=min(self.learner_gpus, slots))

    def pool(self) -> PoolSettings:
        """The slots."""
        return PoolSettings(gpus=self.slots, device_class="gpu.rehearsal", gpus_per_group=self.learner_gpus)


def job_of(number: int, setting: Setting, folder: Path, pool: str, name: str) -> dict[str, Any]:
    """A rehearsal of GRPO. Preparation asks a reference model, for the penalty on the distance to it."""
    scenario = find_scenario(setting.scenario)
    prompts = setting.prompts or scenario.prompts_per_step
    scenario = replace(scenario, prompts_per_step=prompts)
    trace = folder / f"trace-{number}.parquet"
    if not trace.exists():
        epochs = -(-setting.steps // scenario.steps_per_epoch)
        write_trace(trace, replace(scenario, epochs=epochs).draw_trace(seed=number))
    return {
        "apiVersion": "rlhfless.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": scenario.model.name},
            "data": {"source": str(folder)},
            "rewards": [{"name": "right", "math": {}}],
            "algorithm": {"name": "grpo", "kl": {"coefficient": 0.001}},
            "sampling": {"maxPromptTokens": 4096, "maxResponseTokens": scenario.lengths.longest},
            "batch": {"promptsPerStep": prompts, "samplesPerPrompt": scenario.samples_per_prompt},
            "steps": setting.steps,
            "pool": pool,
            "generation": {"pods": _gpus(scenario.gpus_per_instance)},
            "preparation": {"pods": _gpus(scenario.gpus_per_instance)},
            "learning": {"pods": _gpus(setting.learner_gpus), "processes": setting.learner_gpus},
            "rehearsal": {
                "trace": str(trace),
                "gpu": scenario.gpu.name,
                "gpus": scenario.gpus_per_instance,
                "startup": f"{setting.startup:g}s",
                "weightLoad": f"{scenario.weight_load_seconds:g}s",
                "update": f"{scenario.update_seconds:g}s",
                "timeScale": setting.time_scale,
            },
        },
    }


def _gpus(count: int) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}


def observed(timeline: Timeline) -> OpenPlatforms:
    """The operator's own platforms; the timeline is told of every change of a pod's state."""

    @asynccontextmanager
    async def open_platforms(api: Any, settings: ClusterSettings) -> AsyncIterator[MakePlatform]:
        async with knative_platforms(api, settings) as make_platform:

            def make(resource: JobResource, job: RLHFJob, root: str, on_state: StateListener, tell: Tell) -> Any:
                def both(change: StateChange) -> None:
                    timeline.observe(resource.name, change)
                    on_state(change)

                return make_platform(resource, job, root, both, tell)

            yield make

    return open_platforms


@asynccontextmanager
async def cluster_with_operator(
    server: ApiServer, folder: Path, pools: dict[str, PoolSettings], timeline: Timeline
) -> AsyncIterator[Jobs]:
    """A namespace whose jobs an operator runs, on pods that rehearse."""
    async with api_client(server) as api, rehearsing_functions(folder / "functions.log") as launch:
        client = KnativeClient(api, field_manager="knative")
        await install(client)
        give = giving_slots(client)

        async def admit(pod: dict[str, Any], namespace: str) -> dict[str, Any]:
            admitted = await give(pod, namespace)
            timeline.placed(pod["metadata"]["name"], admitted["metadata"]["annotations"][SLOTS].split(","))
            return admitted

        async with KnativeEmulation(client, launch=launch, admit=admit) as knative:
            settings = ClusterSettings(
                functions_image="none",
                artifacts=str(folder / uuid.uuid4().hex[:6]),
                ingress=knative.url,
                pools=pools,
                metrics_port=0,
                liveness_port=0,
            )
            stop = asyncio.Event()
            operating = asyncio.create_task(Operator(settings, observed(timeline)).run(stop))
            try:
                with fresh_namespace(server) as jobs:
                    yield jobs
            finally:
                stop.set()
                await operating


async def run_jobs(
    server: ApiServer, folder: Path, setting: Setting, count: int, how: str, spans: Path | None = None
) -> dict[str, Any]:
    """Run so many jobs at once to their ends; all seconds are emulated ones.

    Args:
        how: on the same slots (`in turns`), each on its part of them (`apart`), or each on as many slots of its own as
            there are (`alone`): emulated GPUs cost nothing.
        spans: file for what each pod did on its slots when, for a picture.
    """
    part = setting.part(count) if how == "apart" else setting
    names = [f"job-{number}" for number in range(count)]
    pools = {name: part.pool() for name in names} if how != "in turns" else {"default": setting.pool()}
    timeline, ends = Timeline(), dict[str, float]()
    async with cluster_with_operator(server, folder, pools, timeline) as jobs:
        begun = time.monotonic()
        for number, name in enumerate(names):
            pool = "default" if how == "in turns" else name
            await asyncio.to_thread(jobs.apply, job_of(number, part, folder, pool, name))
        while len(ends) < count:
            for name in [name for name in names if name not in ends]:
                status = await asyncio.to_thread(jobs.status, name)
                if status.get("phase") == "Failed":
                    raise SystemExit(f"{name} failed: {status}")
                if status.get("phase") == "Succeeded":
                    ends[name] = time.monotonic()
            await asyncio.sleep(_POLL_SECONDS)
    scale = setting.time_scale
    if spans is not None:
        spans.write_text(json.dumps(timeline.document(begun, scale), indent=1) + "\n")
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
    parser.add_argument("--spans", type=Path, default=None, help="file for what each pod of the last run did when")
    parser.add_argument("--spans", type=Path, default=None, help="file for what each pod did when, in the last run")
    given = parser.parse_args()
    if not HAS_API_SERVER:
        raise SystemExit("KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver; see setup-envtest")
    setting = Setting(given.scenario, given.slots, given.learner_gpus, given.steps, given.startup, given.time_scale)
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="slots-") as name, job_server(Path(name)) as server:
        os.environ["KUBECONFIG"] = str(server.kubeconfig)
        for what, count, how in _runs(given.jobs, given.only):
            runs[what] = asyncio.run(run_jobs(server, Path(name), setting, count, how, given.spans))
            spans = runs[what].pop("spans", [])
            print(what, json.dumps(runs[what]), file=sys.stderr, flush=True)
            rows = summary(runs, given.jobs) if "alone" in runs else []
            document = {"command": shlex.join(["python", *sys.argv]), "setting": vars(setting)}
            document |= describe_machine(["rlhfless", "kubernetes", "kopf"])
            if given.spans is not None:
                given.spans.write_text(json.dumps({**document, "run": what, "spans": spans}, indent=1) + "\n")
            if given.json is not None:
                given.json.write_text(json.dumps({**document, "summary": rows, "runs": runs}, indent=2) + "\n")
    if rows:
        Console().print(table_of(rows))


def _runs(counts: Sequence[int], only: Sequence[str]) -> list[tuple[str, int, str]]:
    """Name, number of jobs and how they are carried out."""
    runs = [("alone", max(counts), "alone")]
    runs += [(f"{count} {how}", count, how) for count in counts if count > 1 for how in ("in turns", "apart")]
    return [run for run in runs if run[2] in only]


if __name__ == "__main__":
    main()
