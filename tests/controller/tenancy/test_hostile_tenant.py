"""A hundred documents and folders of a hostile tenant, and what they are to the operator and to the jobs of another."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.control_plane import ApiServer
from tests.controller.operator_harness import Jobs, condition, fresh_namespace, job_server, jobs_path
from tests.controller.tenancy.hostile_operator_process import HUNG, SHOUTING
from tests.jobs import small_job
from tests.prerequisites import needs_api_server

pytestmark = [pytest.mark.slow, needs_api_server("no hostile tenant's documents reach a real API server")]

HONEST = 5
LONGEST_HOLD_UP = 2.0
"""Seconds of processor time that a callback may hold all jobs up."""
MOST_MEMORY = 512 * 2**20
PATTERN = "(?i)" + "[\\U00000001-\\U0010ffff]" * 39
"""As slow to compile as a pattern of a thousand characters can be."""
SECRET = "s3cret-of-the-operator"


def nested(depth: int) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for _ in range(depth):
        content = {"a": content}
    return content


def hostile_documents() -> Iterator[dict[str, Any]]:
    for number in range(12):
        patterns = [f"{PATTERN}{each}" for each in range(10 * number + 1)]
        rewards = [{"name": f"form-{each}", "format": {"pattern": one}} for each, one in enumerate(patterns)]
        yield small_job(f"pattern-{number}", rewards=rewards)
    for number, depth in enumerate((100, 300, 700, 900, 1000, 1500, 3000, 5000)):
        document = small_job(f"deep-{number}")
        document["spec"]["pods"] = {"template": {"spec": nested(depth)}}
        yield document
    for number in range(4):
        yield small_job(f"wide-{number}", pods={"env": {f"V{index}": "x" * 30 for index in range(9_000)}})
    for number, uri in enumerate(("../..", "/etc", "file:///", "s3://other/x", "memory://x", "a::b", "runs/../../x")):
        yield small_job(f"outside-{number}", artifacts={"uri": uri})
    for number in range(33):
        yield small_job(f"{HUNG}{number}")
    for number in range(4):
        yield small_job(f"{SHOUTING}{number}", backoffLimit=1)
    for name in FOLDERS:
        yield small_job(f"folder-{name}", backoffLimit=1)


def sparse(path: Path, beginning: bytes = b"") -> None:
    path.write_bytes(beginning)
    os.truncate(path, 2**30)


def aliases(path: Path) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 13)]
    path.write_text("\n".join(lines))


def begun(folder: Path, **more: Any) -> None:
    (folder / "status.json").write_text(json.dumps({"uid": "x", "step": 1, "steps": 3, **more}))


def bomb(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"[" + b"{}," * 8_000_000 + b"0]")


FOLDERS = {
    "sparse-status": lambda folder: sparse(folder / "status.json", b'{"step": 1'),
    "long-status": lambda folder: begun(folder, message="x" * 4_000_000),
    "bomb-status": lambda folder: bomb(folder / "status.json"),
    "no-status": lambda folder: (folder / "status.json").write_bytes(b"\xff" * 1000),
    "pipe-status": lambda folder: os.mkfifo(folder / "status.json"),
    "linked-status": lambda folder: (folder / "status.json").symlink_to("/proc/self/environ"),
    "zero-status": lambda folder: (folder / "status.json").symlink_to("/dev/zero"),
    "sparse-owner": lambda folder: sparse(folder / "owner.json"),
    "pipe-owner": lambda folder: os.mkfifo(folder / "owner.json"),
    "aliases": lambda folder: (begun(folder), aliases(folder / "job.yaml")),
    "sparse-job": lambda folder: (begun(folder), sparse(folder / "job.yaml")),
    "deep-job": lambda folder: (begun(folder), (folder / "job.yaml").write_text("[" * 100_000)),
    "pattern-job": lambda folder: (begun(folder), (folder / "job.yaml").write_text(json.dumps(slow_document()))),
    "sparse-metrics": lambda folder: (begun(folder), sparse(folder / "metrics.jsonl")),
    "bomb-index": lambda folder: (begun(folder), bomb(folder / "data" / "training" / "index.json")),
    "linked-results": lambda folder: (folder / "results").symlink_to("/etc"),
    "linked-model": lambda folder: (folder / "model").symlink_to(folder.parents[2] / "theirs"),
    "pipe-lease": lambda folder: ((folder / "leases").mkdir(), os.mkfifo(folder / "leases" / "0000000001.json")),
    "many-files": lambda folder: [(folder / f"file-{number}").touch() for number in range(20_000)],
}


def slow_document() -> dict[str, Any]:
    return small_job(rewards=[{"name": "form", "format": {"pattern": PATTERN}}])


ADOPTED = {"annotations": {"rlhfless.io/adopt": "true"}}


@pytest.fixture
def deep_calls() -> Iterator[None]:
    """Calls as deep as the documents."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    yield
    sys.setrecursionlimit(limit)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    folder = tmp_path / "control-plane"
    folder.mkdir()
    with job_server(folder) as api:
        yield api


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "artifacts").mkdir()
    module = "tests.controller.tenancy.hostile_operator_process"
    command = [sys.executable, "-m", module, str(tmp_path / "artifacts"), str(tmp_path / "figures.json")]
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "AWS_SECRET_ACCESS_KEY": SECRET}
    with (tmp_path / "operator.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def memory_of(process: subprocess.Popen[bytes]) -> int:
    """The most memory that the operator and its reader have had, in bytes."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pids = [str(process.pid), *children]
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids if Path(f"/proc/{pid}").exists()]
    return sum(int(found[1]) * 1024 for text in texts if (found := re.search(r"VmHWM:\s+(\d+) kB", text)))


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("deep_calls")
def test_a_hostile_tenant_holds_nobody_up(server: ApiServer, operator: subprocess.Popen[bytes], tmp_path: Path) -> None:
    artifacts, figures = tmp_path / "artifacts", tmp_path / "figures.json"
    with fresh_namespace(server) as hostile, fresh_namespace(server) as honest:
        theirs = artifacts / honest.namespace / "runs"
        for name, plant in FOLDERS.items():
            folder = artifacts / hostile.namespace / "runs" / f"folder-{name}"
            folder.mkdir(parents=True)
            plant(folder)
        honest.apply(small_job("before"))
        honest.wait_phase("before", "Succeeded")
        applied, refused = send(hostile, list(hostile_documents()))
        assert len(applied) + refused + len(FOLDERS) >= 100
        for number in range(HONEST):
            honest.apply(small_job(f"honest-{number}"))
        for number in range(HONEST):
            assert honest.wait_phase(f"honest-{number}", "Succeeded", "Failed")["phase"] == "Succeeded"

        settled = [name for name in applied if not name.startswith(HUNG)]
        for name in settled:
            status = hostile.wait(name, lambda status: status.get("message"), name)
            assert len(status["message"]) <= 8000
            assert "\x1b" not in status["message"]
            assert SECRET not in json.dumps(status)
        for name in settled:
            if name.startswith(("deep-", "wide-", "outside-")):
                refusal = condition(hostile.wait_phase(name, "Failed"), "Accepted")
                assert (refusal["status"], refusal["reason"]) == ("False", "InvalidSpec"), hostile.get(name)
        honest.apply(small_job("after"))
        assert honest.wait_phase("after", "Succeeded", "Failed")["phase"] == "Succeeded"
        assert (theirs / "before" / "model" / "README.md").exists(), "nothing of others is touched"
        events = [reason for reason, _ in hostile.events()]
        assert len(events) <= 10 * len(applied), "refused jobs do not flood the namespace"

    assert operator.poll() is None, "it has not ended, and so was not started again"
    held_up = json.loads(figures.read_text())
    memory = memory_of(operator)
    print(f"{len(applied)} jobs, {refused} refused by the API server: {held_up}, {memory / 2**20:.0f} MiB")
    assert held_up["seconds"] < LONGEST_HOLD_UP, held_up
    assert memory < MOST_MEMORY


def send(jobs: Jobs, documents: list[dict[str, Any]]) -> tuple[list[str], int]:
    """The names of the jobs that the API server takes, and how many documents it refuses."""
    applied, refused = [], 0
    for document in documents:
        document["metadata"] |= ADOPTED
        status, answer = jobs.server.request("POST", jobs_path(jobs.namespace), document)
        if status == 201:
            applied.append(document["metadata"]["name"])
        else:
            assert status in (400, 413, 422), answer
            refused += 1
    return applied, refused
