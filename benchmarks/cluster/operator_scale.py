"""One operator with many jobs: its memory, and its requests to the API server per job and step.

    KUBEBUILDER_ASSETS=... python benchmarks/cluster/operator_scale.py [--jobs 1000] [--steps 3] [--task-seconds 5]

An API server starts from KUBEBUILDER_ASSETS (etcd and kube-apiserver, the convention of envtest), with an operator
whose functions are emulated: they do each task at once or after a while, and write what functions would. The API server
itself counts the requests.
"""

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.shared.records import described_run, write_record
from tests.clusters.control_plane import ApiServer
from tests.controller.operator_harness import (
    fresh_namespace,
    job_server,
    jobs_path,
    operator_process,
)
from tests.jobs import small_job
from tests.prerequisites import HAS_API_SERVER

_COUNTED = {"rlhfjobs", "events", "leases"}
_REQUEST = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)


def requests_of(server: ApiServer) -> Counter[str]:
    """Requests that the API server has answered, by resource and verb."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.token}"})
    with urllib.request.urlopen(request, context=server.context, timeout=60) as answer:
        text = answer.read().decode()
    counts: Counter[str] = Counter()
    for labels, value in _REQUEST.findall(text):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if named["resource"] in _COUNTED:
            name = "/".join(filter(None, (named["resource"], named["subresource"])))
            counts[f"{named['verb']} {name}"] += int(float(value))
    return counts


class Memory:
    """Watches a process's resident memory."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.at_rest = 0
        self.peak = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        return int(self._process.memory_info().rss)

    def _watch(self) -> None:
        while self._process.is_running():
            try:
                self.peak = max(self.peak, self.now())
            except psutil.NoSuchProcess:
                return
            time.sleep(0.2)


def phases(server: ApiServer, namespace: str) -> Counter[str]:
    _, answer = server.request("GET", jobs_path(namespace))
    return Counter(job.get("status", {}).get("phase", "Pending") for job in answer["items"])


def measure(jobs: int, steps: int, task_seconds: float) -> dict[str, Any]:
    """Run the jobs to their ends."""
    if not HAS_API_SERVER:
        raise SystemExit("KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver; see setup-envtest")
    with (
        tempfile.TemporaryDirectory() as folder,
        job_server(Path(folder)) as server,
        fresh_namespace(server) as namespace,
    ):
        os.environ["KUBECONFIG"] = str(server.kubeconfig)
        with operator_process(Path(folder), task_seconds, namespace.namespace) as operator:
            memory = Memory(operator.pid)
            namespace.apply(small_job("first", steps=1))
            namespace.wait_phase("first", "Succeeded", seconds=1200)
            memory.at_rest = memory.now()
            before = requests_of(server)
            began = time.monotonic()
            cpu = psutil.Process(operator.pid).cpu_times()
            with ThreadPoolExecutor(8) as threads:
                made = threads.map(lambda number: namespace.apply(small_job(f"job-{number}", steps=steps)), range(jobs))
                applied = len(list(made))
            most_at_once = 0
            while (counts := phases(server, namespace.namespace))["Succeeded"] < applied + 1:
                if counts["Failed"] or operator.poll() is not None:
                    raise SystemExit(f"jobs ended otherwise: {counts}")
                most_at_once = max(most_at_once, counts["Running"])
                print(f"{time.monotonic() - began:.0f} s: {dict(counts)}, {memory.now() >> 20} MB", file=sys.stderr)
                time.sleep(5)
            seconds = time.monotonic() - began
            used = psutil.Process(operator.pid).cpu_times()
            made_here = Counter({"POST rlhfjobs": jobs})
            counted = requests_of(server) - before - made_here
            peak, rest = memory.peak, memory.at_rest
    per_job = {name: round(count / jobs, 3) for name, count in sorted(counted.items()) if "LIST" not in name}
    written = counted["PATCH rlhfjobs/status"]
    return {
        "jobs": jobs,
        "steps": steps,
        "task_seconds": task_seconds,
        "running_at_once": most_at_once,
        "seconds": round(seconds, 1),
        "operator_cpu_seconds": round(used.user + used.system - cpu.user - cpu.system, 1),
        "operator_resident_bytes_with_one_job": rest,
        "operator_resident_bytes_peak": peak,
        "requests_per_job": per_job,
        "status_writes_per_job_and_step": round(written / jobs / steps, 2),
        "requests_per_job_and_step": round(sum(per_job.values()) / steps, 2),
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--task-seconds", type=float, default=5.0)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    given = parser.parse_args()
    result = {**described_run(["kopf", "kubernetes"]), **measure(given.jobs, given.steps, given.task_seconds)}
    print(json.dumps(result, indent=2))
    write_record(result, given.output)


if __name__ == "__main__":
    main()
