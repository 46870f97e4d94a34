"""An operator under test: in a thread with an event loop of its own, against a real API server."""

import asyncio
import functools
import logging
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from rlhfless_operator.controller.conditions import Tell
from rlhfless_operator.controller.context import MakePlatform, Pacing
from rlhfless_operator.controller.leadership import Election
from rlhfless_operator.controller.main import OpenPlatforms, Operator
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.job.generated.crd import crd
from rlhfless_operator.job.spec import API_VERSION, RLHFJob
from rlhfless_operator.platforms.base import StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.pool_member import PoolMember
from tests.clusters.control_plane import ApiServer, control_plane, wait_until
from tests.clusters.emulated_functions import EmulatedPlatform, Emulation

DEADLINE_SECONDS = 120.0
"""For anything to come about, on a machine that is busy with something else."""
QUICK = Pacing(tick=1.0, lease=0.2, queue=0.2, first_restart=0.05, longest_restart=0.2, services=0.2)


def jobs_path(namespace: str = "default", name: str = "") -> str:
    return f"/apis/{API_VERSION}/namespaces/{namespace}/rlhfjobs" + (f"/{name}" if name else "")


def a_resource(uid: str = "uid", namespace: str = "team") -> JobResource:
    return JobResource.of({"metadata": {"name": uid, "namespace": namespace, "uid": uid}})


def emulated(emulation: Emulation) -> OpenPlatforms:
    """Opens platforms that do nothing but what a driver can see."""

    @asynccontextmanager
    async def open_platforms(client: Any, settings: ClusterSettings) -> AsyncIterator[MakePlatform]:
        def make(member: PoolMember, job: RLHFJob, root: str, on_state: StateListener, tell: Tell) -> JobPlatform:
            return JobPlatform(EmulatedPlatform(emulation, on_state), member)

        yield make

    return open_platforms


@contextmanager
def job_server(
    folder: Path, arguments: Sequence[str] = (), definitions: Sequence[dict[str, Any]] = ()
) -> Iterator[ApiServer]:
    """A control plane with the jobs' definition, and others beside it; `arguments` are further ones of its server."""
    with control_plane(folder, arguments) as api:
        for definition in (crd(), *definitions):
            status, answer = api.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
            assert status == 201, answer
            spec = definition["spec"]
            path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            wait_until(functools.partial(api.request, "GET", path), folder)
        yield api


@contextmanager
def fresh_namespace(server: ApiServer) -> Iterator["Jobs"]:
    """A namespace of a test's own; nothing stays in it."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    status, answer = server.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    assert status == 201, answer
    jobs = Jobs(server, namespace)
    try:
        yield jobs
    finally:
        jobs.clear()


class RunningOperator:
    """A handle on an operator in a thread."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="operator")
        self._thread.start()
        wait_for(lambda: operator.liveness_port is not None or self.error is not None)

    def stop(self) -> None:
        """End it as SIGTERM does."""
        if self._thread.is_alive():
            assert self._loop is not None
            assert self._stop is not None
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def get(self, port: int | None, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def _run(self) -> None:
        async def main() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await self.operator.run(self._stop)

        try:
            asyncio.run(main())
        except BaseException as error:
            logging.getLogger(__name__).exception("the operator has ended with an error")
            self.error = error


@contextmanager
def running_operator(
    artifacts: Path,
    emulation: Emulation | None = None,
    *,
    open_platforms: OpenPlatforms | None = None,
    election: Election | None = None,
    pacing: Pacing = QUICK,
    files: Path | None = None,
    namespaces: tuple[str, ...] = (),
    **more: Any,
) -> Iterator[RunningOperator]:
    """An operator on the cluster that KUBECONFIG names; `more` are further settings of it."""
    settings = ClusterSettings(
        functions_image="none",
        namespaces=namespaces,
        files=str(files or "/files"),
        artifacts=str(artifacts),
        metrics_port=0,
        liveness_port=0,
        **more,
    )
    operator = RunningOperator(
        Operator(settings, open_platforms or emulated(emulation or Emulation()), election=election, pacing=pacing)
    )
    try:
        yield operator
    finally:
        operator.stop()
    assert operator.error is None, operator.error


class Jobs:
    """The RLHFJobs of a namespace, as a user sees them."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.server = server
        self.namespace = namespace

    def apply(self, job: dict[str, Any]) -> dict[str, Any]:
        status, answer = self.server.request("POST", jobs_path(self.namespace), job)
        assert status == 201, answer
        return answer

    def get(self, name: str) -> dict[str, Any] | None:
        status, answer = self.server.request("GET", jobs_path(self.namespace, name))
        return answer if status == 200 else None

    def patch(self, name: str, change: dict[str, Any], subresource: str = "") -> tuple[int, Any]:
        path = jobs_path(self.namespace, name) + subresource
        return self.server.request("PATCH", path, change, "application/merge-patch+json")

    def delete(self, name: str) -> None:
        self.server.request("DELETE", jobs_path(self.namespace, name))

    def clear(self) -> None:
        """Remove all that a test left, for the next one's operator to find none of it."""
        _, answer = self.server.request("GET", jobs_path(self.namespace))
        for job in answer["items"]:
            name = job["metadata"]["name"]
            self.patch(name, {"metadata": {"finalizers": None}})
            self.delete(name)

    def status(self, name: str) -> dict[str, Any]:
        job = self.get(name)
        return job.get("status", {}) if job else {}

    def wait(
        self, name: str, done: Callable[[dict[str, Any]], Any], what: str = "", *, seconds: float = DEADLINE_SECONDS
    ) -> dict[str, Any]:
        """The status, once it is as wanted."""
        return wait_for(
            lambda: status if done(status := self.status(name)) else None,
            lambda: f"{what} {self.status(name)}",
            seconds=seconds,
        )

    def wait_phase(self, name: str, *phases: str, seconds: float = DEADLINE_SECONDS) -> dict[str, Any]:
        what = f"waiting for {phases}:"
        return self.wait(name, lambda status: status.get("phase") in phases, what, seconds=seconds)

    def wait_gone(self, name: str) -> None:
        wait_for(lambda: self.get(name) is None, lambda: f"still there: {(self.get(name) or {}).get('metadata')}")

    def events(self) -> list[tuple[str, str]]:
        """Reason and object of every event."""
        _, answer = self.server.request("GET", f"/api/v1/namespaces/{self.namespace}/events")
        return [(item["reason"], item["involvedObject"]["name"]) for item in answer["items"]]


def wait_for(
    ask: Callable[[], Any], describe: Callable[[], str] = lambda: "", *, seconds: float = DEADLINE_SECONDS
) -> Any:
    """What `ask` answers, once that is something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if answer := ask():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"nothing came of it: {describe()}")


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """A condition; empty if there is none of the type."""
    return next((item for item in status.get("conditions", []) if item["type"] == kind), {})


@contextmanager
def operator_process(
    artifacts: Path, task_seconds: float, namespace: str, *, elect: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """An operator of one namespace in a process of its own, which may be killed; its log is beside the artifacts."""
    program = [sys.executable, "-m", "tests.controller.operator_process"]
    command = [*program, str(artifacts), str(task_seconds), namespace, *(["elect"] if elect else [])]
    with (artifacts / "operator.log").open("ab") as log:
        process = subprocess.Popen(command, stderr=log, cwd=Path(__file__).parents[2])
        try:
            yield process
        finally:
            process.terminate()
            process.wait()
