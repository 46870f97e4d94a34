"""Hundreds of bad documents on a real API server: each is refused by it, or by a condition with reason and remedy."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.job.reading.validation import InvalidJobError, parse_content
from tests.clusters.control_plane import ApiServer
from tests.clusters.emulated_functions import Emulation
from tests.controller.operator_harness import (
    RunningOperator,
    condition,
    fresh_namespace,
    job_server,
    jobs_path,
    running_operator,
)
from tests.job.mutations import mutated
from tests.jobs import small_job
from tests.prerequisites import needs_api_server

WANTED = 220

BEYOND_A_SCHEMA: tuple[dict[str, Any], ...] = (
    {"rewards": [{"name": "right", "math": {}, "memory": "9999999Ti"}]},
    {"rewards": [{"name": "right", "format": {"pattern": "(<answer>"}}]},
    {"rewards": [{"name": "right", "exactMatch": {"pattern": "[0-9"}}]},
    {"activeDeadline": f"{'9' * 400}d"},
    {"ttlAfterFinished": f"{'9' * 400}d"},
    {"limits": {"stall": f"{'9' * 400}h"}},
    {"learning": {"keepAlive": f"{'9' * 400}s"}},
)
"""What an API server takes and no driver could."""

ODD_FOLDERS = ("nowhere://x", "a\0b", "x" * 5000, "::", "file:///dev/null/x", "s3://")
"""Where nothing can be written."""

pytestmark = needs_api_server("no bad documents are applied to a real API server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with job_server(tmp_path_factory.mktemp("control-plane")) as api:
        yield api


def bad_documents() -> Iterator[dict[str, Any]]:
    """Documents that are no jobs, each under its own name, without end."""
    chance = random.Random(0)
    number = 0
    while True:
        document = mutated(chance)
        document["metadata"]["name"] = f"bad-{number}"
        try:
            parse_content(document, "job")
        except InvalidJobError:
            number += 1
            yield document


def test_every_bad_document_is_refused_with_a_reason(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    refused = 0
    accepted = [f"beyond-{number}" for number in range(len(BEYOND_A_SCHEMA))]
    emulation = Emulation()
    with (
        fresh_namespace(server) as jobs,
        running_operator(tmp_path, emulation, namespaces=(jobs.namespace,)) as operator,
    ):
        for name, spec in zip(accepted, BEYOND_A_SCHEMA, strict=True):
            jobs.apply(small_job(name, suspend=True, **spec))
        path = f"{jobs_path(jobs.namespace)}?fieldValidation=Strict"
        documents = bad_documents()
        while refused + len(accepted) < WANTED:
            document = next(documents)
            document["spec"]["suspend"] = True
            status, answer = server.request("POST", path, document)
            if status != 201:
                assert status in (400, 422), answer
                assert answer["message"]
                refused += 1
            elif is_bad(answer):
                accepted.append(document["metadata"]["name"])
            # Else the server has dropped a null where nothing was meant, as it does.
        for name in accepted:
            jobs.patch(name, {"spec": {"suspend": False}})
        for name in accepted:
            status = jobs.wait_phase(name, "Failed", "Succeeded")
            refusal = condition(status, "Accepted")
            assert (refusal["status"], refusal["reason"]) == ("False", "InvalidSpec"), jobs.get(name)
            assert "; " in refusal["message"], "a fault and its remedy"
        assert emulation.requests == []

        jobs.apply(small_job("good"))
        jobs.wait_phase("good", "Succeeded")
        jobs.wait("good", lambda status: "driver" in status)
        before = requests_of(operator)
        for name in accepted[:20]:
            assert jobs.status(name)["phase"] == "Failed"
        assert requests_of(operator) == before, "nothing goes in circles"
        assert "silent" in operator.get(operator.operator.liveness_port, "/healthz")


def odd_documents() -> Iterator[dict[str, Any]]:
    """An endless number of documents that are jobs, however strange."""
    chance = random.Random(1)
    number = 0
    while True:
        document = mutated(chance)
        document["metadata"]["name"] = f"odd-{number}"
        spec = document["spec"]
        for name in ("epochs", "suspend", "ttlAfterFinished", "rehearsal", "artifacts"):
            spec.pop(name, None)
        spec["steps"] = 1
        if number < len(ODD_FOLDERS):
            spec["artifacts"] = {"uri": ODD_FOLDERS[number]}
        try:
            parse_content(document, "job")
        except InvalidJobError:
            continue
        number += 1
        yield document


@pytest.mark.parametrize("count", [15, pytest.param(60, marks=pytest.mark.nightly)])
def test_odd_documents_do_no_harm(
    server: ApiServer, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """With an S3 server that answers: one without credentials is waited for."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    # One of the folders names a file of the working directory.
    monkeypatch.chdir(tmp_path)
    with (
        fresh_namespace(server) as jobs,
        running_operator(tmp_path, namespaces=(jobs.namespace,)) as operator,
    ):
        names = []
        for document in itertools.islice(odd_documents(), count):
            document["spec"]["backoffLimit"] = 1
            jobs.apply(document)
            names.append(document["metadata"]["name"])
        for name in names:
            # On a slow machine a document's own budget may end first.
            status = jobs.wait_phase(name, "Failed", "Succeeded", "Suspended")
            if status["phase"] == "Suspended":
                assert status["reason"] == "BudgetExhausted"
            if status["phase"] == "Failed":
                assert condition(status, "Failed")["reason"]
                assert status["message"]
        jobs.apply(small_job("good"))
        jobs.wait_phase("good", "Succeeded")
        assert json.loads(operator.get(operator.operator.liveness_port, "/healthz")) == {"silent": []}


def is_bad(document: dict[str, Any]) -> bool:
    """Whether a document that the server has stored is no job."""
    try:
        JobResource.of(document).job()
    except InvalidJobError:
        return True
    return False


def requests_of(operator: RunningOperator) -> list[str]:
    """How many requests the operator has made so far, by verb."""
    exposition = operator.get(operator.operator.metrics_port, "/metrics")
    return [line for line in exposition.splitlines() if line.startswith("rlhfless_operator_api_requests_total{")]
