"""One operator with many jobs whose actors stream: its processor time and its memory.

    KUBEBUILDER_ASSETS=... python benchmarks/cluster/operator_streams.py [--jobs 16 62] [--seconds 30] [--idle]

The operator is a process of its own with all that drives jobs, against a real API server. Generation is asked by HTTP
over loopback, of a server in another process (`stream_server.py`) that sends what actors send. The other stages are
emulated, and are over when the measurement begins. Processor time is the operator's alone, so it does not depend on
what else the machine does, as long as streams keep up.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.shared.records import described_run, write_record
from rlhfless_functions.api import Event, GenerationRequest, RunRequest
from rlhfless_operator.controller.conditions import Tell
from rlhfless_operator.controller.context import MakePlatform, Pacing
from rlhfless_operator.controller.logs import configure_logs
from rlhfless_operator.controller.main import Operator
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.base import StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.pods.dispatch import deliver
from rlhfless_operator.platforms.pods.stage_pods import StagePods
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.platforms.stream import open_session, run_task
from tests.clusters.emulated_functions import EmulatedPlatform, Emulation
from tests.controller.operator_harness import fresh_namespace, job_server
from tests.jobs import small_job
from tests.prerequisites import HAS_API_SERVER

ACTORS = 16
_GROUP = 8
_ROOT = Path(__file__).parents[2]


class StreamingPlatform(EmulatedPlatform):
    """A job's functions, of which generation is asked by HTTP as on a cluster, with a session of the job's own."""

    def __init__(self, emulation: Emulation, on_state: StateListener, url: str) -> None:
        super().__init__(emulation, on_state)
        self._url = url
        self._book = StagePods("generation", on_state, lambda: None)
        self._session: aiohttp.ClientSession | None = None

    async def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        if not isinstance(request, GenerationRequest):
            async for event in super().run(request):
                yield event
            return
        session = self._session = self._session or open_session()

        def attempt(start_seconds: float) -> AsyncGenerator[Event, None]:
            return run_task(session, self._url, "token", request, stall_seconds=120.0, start_seconds=start_seconds)

        async for event in deliver(attempt, self._book, lambda: "", 600.0):
            yield event

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await super().close()


def operate(artifacts: str, namespace: str, port: int, prompts: int) -> None:
    """Be the operator, until the process is ended."""
    _open_many_files()
    configure_logs("text")
    emulation = Emulation(remember=False, prompts=prompts)

    @asynccontextmanager
    async def open_platforms(client: Any, settings: ClusterSettings) -> AsyncIterator[MakePlatform]:
        def make(member: PoolMember, job: RLHFJob, root: str, on_state: StateListener, tell: Tell) -> JobPlatform:
            return JobPlatform(StreamingPlatform(emulation, on_state, f"http://127.0.0.1:{port}"), member)

        yield make

    settings = ClusterSettings(
        functions_image="none", artifacts=artifacts, namespaces=(namespace,), metrics_port=0, liveness_port=0
    )
    asyncio.run(Operator(settings, open_platforms, pacing=Pacing()).run())


def measure(folder: Path, jobs: int, samples: int, seconds: float, *, idle: bool) -> dict[str, Any]:
    """Run the jobs until all of their actors stream; measure the operator for some seconds, and end it."""
    prompts = ACTORS * samples // _GROUP
    with job_server(folder) as server, fresh_namespace(server) as namespace, _stream_server(idle) as port:
        os.environ["KUBECONFIG"] = str(server.kubeconfig)
        own = ["--operate", str(folder), namespace.namespace, str(port), str(prompts)]
        with _process(folder / "operator.log", __file__, *own) as operator:
            documents = [
                small_job(
                    f"job-{number}",
                    steps=1,
                    batch={"promptsPerStep": prompts, "samplesPerPrompt": _GROUP},
                    generation={"instances": {"min": ACTORS, "max": ACTORS}},
                    sampling={"maxResponseTokens": 8192},
                    planning={"policy": "even", "migration": {"slots": samples}},
                )
                for number in range(jobs)
            ]
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(namespace.apply, documents))
            began = time.monotonic()
            while (streams := _counts(port)["streams"]) < jobs * ACTORS:
                if operator.poll() is not None or time.monotonic() > began + 900:
                    raise SystemExit(f"{streams} streams only; see {folder / 'operator.log'}")
                time.sleep(1)
            started = time.monotonic() - began
            time.sleep(10)
            return {
                "streams": streams,
                "jobs": jobs,
                "seconds_until_all_streamed": round(started, 1),
                **_watched(psutil.Process(operator.pid), port, seconds, streams),
            }


def _watched(operator: psutil.Process, port: int, seconds: float, streams: int) -> dict[str, Any]:
    before, counted, began = operator.cpu_times(), _counts(port), time.monotonic()
    time.sleep(seconds)
    after, now, took = operator.cpu_times(), _counts(port), time.monotonic() - began
    events, used = now["events"] - counted["events"], after.user + after.system - before.user - before.system
    return {
        "seconds": round(took, 2),
        "streams_at_the_end": now["streams"],
        "events_per_second": round(events / took, 1),
        "kilobytes_per_second": round((now["sent_bytes"] - counted["sent_bytes"]) / took / 1000, 1),
        "operator_cores": round(used / took, 3),
        "cpu_microseconds_per_event": round(1e6 * used / events, 1),
        "cpu_milliseconds_per_stream_and_second": round(1e3 * used / took / streams, 4),
        "operator_resident_megabytes": operator.memory_info().rss >> 20,
    }


def _counts(port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=120) as answer:
        counts: dict[str, int] = json.load(answer)
    return counts


@contextmanager
def _stream_server(idle: bool) -> Iterator[int]:
    command = [sys.executable, "-m", "benchmarks.cluster.stream_server", *(["--idle"] if idle else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT, preexec_fn=_open_many_files) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


@contextmanager
def _process(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file, subprocess.Popen([sys.executable, *arguments], stderr=file, cwd=_ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def _open_many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[16, 62])
    parser.add_argument("--samples", type=int, default=64, help="running samples of an actor")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--idle", action="store_true", help="streams send heartbeats alone")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    parser.add_argument("--operate", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.operate:
        artifacts, namespace, port, prompts = given.operate
        operate(artifacts, namespace, int(port), int(prompts))
        return
    if not HAS_API_SERVER:
        raise SystemExit("KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver; see setup-envtest")
    result = {
        **described_run(["aiohttp", "kopf", "pydantic"]),
        "samples_per_actor": given.samples,
        "idle": given.idle,
        "measured": [],
    }
    for jobs in given.jobs:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), jobs, given.samples, given.seconds, idle=given.idle)
        print(json.dumps(found), file=sys.stderr, flush=True)
        result["measured"].append(found)
    print(json.dumps(result, indent=2))
    write_record(result, given.output)


if __name__ == "__main__":
    main()
