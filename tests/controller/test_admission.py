"""The webhook by which function pods go quickly: its answers, its server, and what an API server makes of both."""

import asyncio
import base64
import copy
import json
import ssl
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlhfless_operator.controller.admission import review
from rlhfless_operator.controller.endpoints import ADMISSION_PATH, serve_admission
from rlhfless_operator.controller.leadership import Election
from rlhfless_operator.controller.main import Operator
from rlhfless_operator.platforms.cluster_settings import ClusterSettings, ClusterSettingsError
from tests.clusters.control_plane import ApiServer, control_plane
from tests.clusters.emulated_functions import Emulation
from tests.controller.certificates import write_certificate
from tests.controller.operator_harness import RunningOperator, emulated, wait_for
from tests.prerequisites import needs_api_server

PRE_STOP = {"httpGet": {"path": "/wait-for-drain", "port": 8022}}
GRACE = 10
PODS = "/api/v1/namespaces/default/pods"


def function_pod(**spec: Any) -> dict[str, Any]:
    """A pod as Knative makes it of a stage's Revision, with its sidecar."""
    function = {"name": "function", "image": "functions", "lifecycle": {"preStop": PRE_STOP}}
    sidecar = {"name": "queue-proxy", "image": "queue", "lifecycle": {"preStop": PRE_STOP}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"p-{uuid.uuid4().hex[:8]}", "labels": {"rlhfless.io/job": "j", "app": "x"}},
        "spec": {"containers": [function, sidecar], "terminationGracePeriodSeconds": 43200, **spec},
    }


def asked(pod: Any, **request: Any) -> dict[str, Any]:
    """An API server's question."""
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "operation": "CREATE",
            "object": pod,
            **request,
        },
    }


def patch_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = answer["response"]
    assert (response["uid"], response["allowed"]) == ("u-1", True)
    if "patch" not in response:
        return []
    assert response["patchType"] == "JSONPatch"
    patch: list[dict[str, Any]] = json.loads(base64.b64decode(response["patch"]))
    return patch


ZONES = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
OWN_AFFINITY = {
    "podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {
                "weight": 3,
                "podAffinityTerm": {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": {"app": "y"}},
                },
            }
        ]
    }
}
GRACE_PATCH = {"op": "add", "path": "/spec/terminationGracePeriodSeconds", "value": GRACE}


# --- the answers ---


def test_a_function_pod_loses_its_hook_and_gets_the_grace_period() -> None:
    question = asked(function_pod())
    before = copy.deepcopy(question)
    assert patch_of(review(question, GRACE)) == [
        {"op": "remove", "path": "/spec/containers/0/lifecycle/preStop"},
        GRACE_PATCH,
    ]
    assert question == before


def test_the_function_is_found_wherever_it_is_among_the_containers() -> None:
    pod = function_pod()
    pod["spec"]["containers"].reverse()
    assert patch_of(review(asked(pod), GRACE))[0]["path"] == "/spec/containers/1/lifecycle/preStop"


@pytest.mark.parametrize("lifecycle", [None, {}, {"postStart": {"exec": {"command": ["true"]}}}])
def test_a_function_without_the_hook_gets_the_grace_period_alone(lifecycle: Any) -> None:
    pod = function_pod()
    pod["spec"]["containers"][0]["lifecycle"] = lifecycle
    assert patch_of(review(asked(pod), GRACE)) == [GRACE_PATCH]


@pytest.mark.parametrize(("grace", "kept"), [(None, False), (11, False), (10, True), (3, True), (0, True)])
def test_a_grace_period_that_is_shorter_already_stays(grace: int | None, kept: bool) -> None:
    patch = patch_of(review(asked(function_pod(terminationGracePeriodSeconds=grace)), GRACE))
    assert (GRACE_PATCH not in patch) == kept


def unlabelled() -> dict[str, Any]:
    pod = function_pod()
    pod["metadata"]["labels"] = {"app": "x"}
    return pod


def somebody_elses() -> dict[str, Any]:
    pod = function_pod()
    pod["spec"]["containers"][0]["name"] = "user-container"
    return pod


@pytest.mark.parametrize(
    "question",
    [
        asked(unlabelled()),
        asked(function_pod() | {"metadata": {}}),
        asked(somebody_elses()),
        asked(function_pod(), operation="UPDATE"),
        asked(None, operation="DELETE"),
        asked(function_pod(), kind={"group": "serving.knative.dev", "version": "v1", "kind": "Service"}),
        asked({"metadata": {"labels": {"rlhfless.io/job": "j"}}}),
    ],
    ids=["no label", "no labels", "no function", "update", "delete", "another kind", "no spec"],
)
def test_everything_else_is_allowed_as_it_is(question: dict[str, Any]) -> None:
    assert patch_of(review(question, GRACE)) == []


@pytest.mark.parametrize("body", [[], {}, {"kind": "AdmissionReview"}, {"kind": "AdmissionReview", "request": {}}])
def test_what_is_no_review_is_an_error(body: Any) -> None:
    with pytest.raises(ValueError, match="not an AdmissionReview"):
        review(body, GRACE)


def staged(**spec: Any) -> dict[str, Any]:
    """A pod of generation."""
    pod = function_pod(**spec)
    pod["metadata"]["labels"]["rlhfless.io/stage"] = "generation"
    return pod


def test_pods_are_placed_with_and_without_quick_release() -> None:
    quick = patch_of(review(asked(staged()), GRACE))
    placed = patch_of(review(asked(staged()), None, ZONES))
    assert {each["path"] for each in placed} == {"/spec/affinity", "/spec/topologySpreadConstraints"}
    assert patch_of(review(asked(staged()), GRACE, ZONES)) == [*quick, *placed]
    assert patch_of(review(asked(staged()), None)) == []
    assert patch_of(review(asked(unlabelled()), GRACE, ZONES)) == []


# --- the server ---


def trusting(certificate: bytes) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=certificate.decode())


async def test_reviews_are_answered_by_tls(tmp_path: Path) -> None:
    trust = trusting(write_certificate(tmp_path))
    async with serve_admission(0, tmp_path, GRACE) as port, aiohttp.ClientSession() as session:
        url = f"https://localhost:{port}{ADMISSION_PATH}"
        async with session.post(url, json=asked(function_pod()), ssl=trust) as response:
            assert (response.status, response.content_type) == (200, "application/json")
            assert len(patch_of(await response.json())) == 2
        for body in (b"{", b"[]", b"\xff"):
            async with session.post(url, data=body, ssl=trust) as response:
                assert response.status == 400
        # As long as an API server may send one.
        annotated = function_pod()
        annotated["metadata"]["annotations"] = {"a": "x" * 3_000_000}
        async with session.post(url, json=asked(annotated), ssl=trust) as response:
            assert len(patch_of(await response.json())) == 2
        async with session.get(url, ssl=trust) as response:
            assert response.status == 405


async def test_a_certificate_is_renewed_and_a_broken_one_is_not_taken(tmp_path: Path) -> None:
    first = write_certificate(tmp_path)
    async with serve_admission(0, tmp_path, GRACE, renewal_seconds=0.02) as port:

        async def trusted(certificate: bytes) -> bool:
            try:
                _, writer = await asyncio.open_connection("localhost", port, ssl=trusting(certificate))
            except ssl.SSLError:
                return False
            writer.close()
            return True

        assert await trusted(first)
        key = (tmp_path / "tls.key").read_bytes()
        second = write_certificate(tmp_path)
        right = (tmp_path / "tls.key").read_bytes()
        async with asyncio.timeout(60):
            while not await trusted(second):
                await asyncio.sleep(0.02)
        assert not await trusted(first)
        (tmp_path / "tls.key").write_bytes(key)
        await asyncio.sleep(0.2)
        assert await trusted(second), "a key of another certificate is not taken"
        (tmp_path / "tls.key").write_bytes(right)
        third = write_certificate(tmp_path)
        async with asyncio.timeout(60):
            while not await trusted(third):
                await asyncio.sleep(0.02)


async def test_nothing_is_served_without_a_port(tmp_path: Path) -> None:
    async with serve_admission(None, tmp_path, GRACE) as port:
        assert port is None


async def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterSettingsError, match=r"RLHFLESS_ADMISSION_CERTIFICATE: .*kubernetes.io/tls"):
        async with serve_admission(0, tmp_path, GRACE):
            pass
    (tmp_path / "tls.crt").write_text("none")
    (tmp_path / "tls.key").write_text("none")
    with pytest.raises(ClusterSettingsError, match="no valid certificate"):
        async with serve_admission(0, tmp_path, GRACE):
            pass


# --- a real API server ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with control_plane(tmp_path_factory.mktemp("control-plane")) as api:
        yield api


@pytest.fixture
def follower(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningOperator]:
    """An operator that waits to lead: another one has the Lease."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    write_certificate(tmp_path)
    lease = {
        "metadata": {"name": Election("default").name},
        "spec": {
            "holderIdentity": "another",
            "leaseDurationSeconds": 3600,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "acquireTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    }
    status, answer = server.request("POST", "/apis/coordination.k8s.io/v1/namespaces/default/leases", lease)
    assert status == 201, answer
    settings = ClusterSettings(
        functions_image="none",
        metrics_port=0,
        liveness_port=0,
        admission_port=0,
        admission_certificate=str(tmp_path),
        admission_grace_seconds=GRACE,
        topology_keys=ZONES,
    )
    operator = RunningOperator(Operator(settings, emulated(Emulation()), election=Election("default")))
    assert operator.error is None, operator.error
    yield operator
    operator.stop()
    assert operator.error is None, operator.error


def register(server: ApiServer, port: int | None, certificate: bytes) -> None:
    """Have the API server ask the webhook, as the chart does."""
    webhook = {
        "name": "pods.rlhfless.io",
        "clientConfig": {
            "url": f"https://localhost:{port}{ADMISSION_PATH}",
            "caBundle": base64.b64encode(certificate).decode(),
        },
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "objectSelector": {"matchExpressions": [{"key": "rlhfless.io/job", "operator": "Exists"}]},
        "failurePolicy": "Ignore",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 2,
    }
    path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    status, answer = server.request("POST", path, {"metadata": {"name": "rlhfless"}, "webhooks": [webhook]})
    assert status == 201, answer


def created(server: ApiServer, pod: dict[str, Any]) -> dict[str, Any]:
    """The spec of a pod as the API server has made it."""
    status, answer = server.request("POST", PODS, pod)
    assert status == 201, answer
    spec: dict[str, Any] = answer["spec"]
    return spec


@needs_api_server("no pod is created")
def test_an_api_server_creates_function_pods_that_go_quickly_and_creates_them_anyway_when_nobody_answers(
    server: ApiServer, follower: RunningOperator, tmp_path: Path
) -> None:
    register(server, follower.operator.admission_port, (tmp_path / "tls.crt").read_bytes())
    # The API server takes a moment to heed a new configuration.
    spec = wait_for(
        lambda: made if (made := created(server, function_pod()))["terminationGracePeriodSeconds"] == GRACE else None
    )
    function, sidecar = spec["containers"]
    assert "preStop" not in function.get("lifecycle", {})
    assert sidecar["lifecycle"] == {"preStop": {"httpGet": {**PRE_STOP["httpGet"], "scheme": "HTTP"}}}
    placed = created(server, staged(affinity=OWN_AFFINITY))
    terms = placed["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["weight"] for term in terms] == [100, 25, 10, 2]
    assert placed["affinity"]["podAntiAffinity"] == OWN_AFFINITY["podAntiAffinity"]
    assert [each["whenUnsatisfiable"] for each in placed["topologySpreadConstraints"]] == ["ScheduleAnyway"]
    other = created(server, unlabelled())
    assert "affinity" not in other
    assert other["terminationGracePeriodSeconds"] == 43200
    assert "preStop" in other["containers"][0]["lifecycle"]
    follower.stop()
    assert created(server, function_pod())["terminationGracePeriodSeconds"] == 43200
    alone = created(server, staged(affinity=OWN_AFFINITY))
    assert alone["affinity"] == OWN_AFFINITY and "topologySpreadConstraints" not in alone


async def test_with_an_authority_of_clients_nobody_else_is_answered(tmp_path: Path) -> None:
    served, known, unknown = (tmp_path / name for name in ("served", "known", "unknown"))
    for folder in (served, known, unknown):
        folder.mkdir()
        write_certificate(folder)
    async with serve_admission(0, served, 5, clients=known / "tls.crt") as port, aiohttp.ClientSession() as session:
        for client in (known, unknown, None):
            context = trusting((served / "tls.crt").read_bytes())
            if client is not None:
                context.load_cert_chain(client / "tls.crt", client / "tls.key")
            question = session.post(f"https://localhost:{port}/pods", json=asked(function_pod()), ssl=context)
            if client == known:
                assert (await question).status == 200
            else:
                with pytest.raises(aiohttp.ClientError):
                    await question
