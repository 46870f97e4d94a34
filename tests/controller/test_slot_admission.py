"""The webhook that gives new pods their slots: its answers, and what an API server makes of them."""

import asyncio
import base64
import json
import ssl
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlhfless_operator.controller import slot_admission
from rlhfless_operator.controller.endpoints import ANSWER_SECONDS, SLOTS_PATH, serve_admission
from rlhfless_operator.controller.slot_admission import SlotAdmission
from rlhfless_operator.knative import ForbiddenError, KnativeClient
from rlhfless_operator.platforms.pods.pod_watch import PODS
from rlhfless_operator.platforms.turns.slot_claims import CLAIMS, claim
from tests.clusters.control_plane import ApiServer, control_plane
from tests.clusters.knative_definitions import NAMESPACES, api_client
from tests.controller.certificates import write_certificate
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("no pods are made")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with control_plane(tmp_path_factory.mktemp("control-plane")) as api:
        yield api


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[KnativeClient]:
    async with api_client(server) as api:
        yield KnativeClient(api, field_manager="tests")


@pytest.fixture
async def namespace(client: KnativeClient) -> str:
    name = f"test-{uuid.uuid4().hex[:8]}"
    await client.resource(NAMESPACES).create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


def slotted_pod(namespace: str, stage: str = "generation", gpus: int = 1) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"p-{uuid.uuid4().hex[:8]}",
            "namespace": namespace,
            "labels": {"rlhfless.io/job": "j", "rlhfless.io/stage": stage, "rlhfless.io/takes-turns": "true"},
            "annotations": {"rlhfless.io/pool": "default", "rlhfless.io/gpus": str(gpus)},
        },
        "spec": {"containers": [{"name": "function", "image": "f"}]},
    }


async def answer(admission: SlotAdmission, pod: dict[str, Any], **request: Any) -> dict[str, Any]:
    question = {"uid": "u", "operation": "CREATE", "namespace": pod["metadata"]["namespace"], "object": pod, **request}
    response: dict[str, Any] = (await admission.review({"kind": "AdmissionReview", "request": question}))["response"]
    return response


def slots_in(response: dict[str, Any]) -> str:
    patch = json.loads(base64.b64decode(response["patch"]))
    return next(each["value"] for each in patch if each["path"].endswith("rlhfless.io~1slots"))


async def test_pods_that_are_made_at_once_get_different_slots(client: KnativeClient, namespace: str) -> None:
    for group in range(3):
        await client.resource(CLAIMS).create(claim(namespace, "default", "gpu.test", group, 0))
    admission = SlotAdmission(client)
    answers = await asyncio.gather(*(answer(admission, slotted_pod(namespace)) for _ in range(3)))
    assert {slots_in(each) for each in answers} == {f"rlhfless-default-{group}-0" for group in range(3)}


async def test_four_hundred_pods_that_are_made_at_once_share_looks_and_get_all_slots_evenly(
    client: KnativeClient, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in range(2):
        for number in range(2):
            await client.resource(CLAIMS).create(claim(namespace, "default", "gpu.test", group, number))
    monkeypatch.setitem(ANSWER_SECONDS, SLOTS_PATH, 600.0)
    monkeypatch.setattr(slot_admission, "_MEMORY_SECONDS", 600.0)
    admission, looks = SlotAdmission(client), []
    list_claims = admission._claims.list

    async def counted(*arguments: Any, **options: Any) -> Any:
        looks.append(arguments)
        return await list_claims(*arguments, **options)

    monkeypatch.setattr(admission._claims, "list", counted)
    trust = ssl.create_default_context(cadata=write_certificate(tmp_path).decode())
    connector = aiohttp.TCPConnector(ssl=trust, limit=0)
    async with (
        serve_admission(0, tmp_path, None, admission) as port,
        aiohttp.ClientSession(connector=connector) as session,
    ):

        async def post() -> str:
            request = {"uid": "u", "operation": "CREATE", "namespace": namespace, "object": slotted_pod(namespace)}
            body = {"kind": "AdmissionReview", "request": request}
            async with session.post(f"https://localhost:{port}{SLOTS_PATH}", json=body) as response:
                assert response.status == 200, await response.text()
                return slots_in((await response.json())["response"])

        given = Counter(await asyncio.gather(*(post() for _ in range(400))))
    assert set(given.values()) == {100}
    assert len(looks) <= 400 / 4


async def test_a_dry_run_takes_no_slot(client: KnativeClient, namespace: str) -> None:
    for group in range(2):
        await client.resource(CLAIMS).create(claim(namespace, "default", "gpu.test", group, 0))
    admission = SlotAdmission(client)
    assert slots_in(await answer(admission, slotted_pod(namespace), dryRun=True)) == "rlhfless-default-0-0"
    assert slots_in(await answer(admission, slotted_pod(namespace))) == "rlhfless-default-0-0"


async def test_a_pod_without_a_slot_to_have_is_refused_with_the_reason(client: KnativeClient, namespace: str) -> None:
    refused = await answer(SlotAdmission(client), slotted_pod(namespace))
    assert not refused["allowed"]
    assert "pool default has no 1 slots for a pod in namespace" in refused["status"]["message"]


async def test_a_pod_is_refused_while_the_claims_cannot_be_looked_at(
    client: KnativeClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forbidden(*arguments: Any, **options: Any) -> None:
        raise ForbiddenError(403, "Forbidden", "resourceclaims is forbidden")

    admission = SlotAdmission(client)
    monkeypatch.setattr(admission._claims, "list", forbidden)
    refused = await answer(admission, slotted_pod(namespace))
    assert not refused["allowed"]
    assert "resourceclaims is forbidden" in refused["status"]["message"]


@pytest.mark.parametrize("change", [{"operation": "UPDATE"}, {"object": None}])
async def test_everything_else_is_allowed_as_it_is(
    client: KnativeClient, namespace: str, change: dict[str, Any]
) -> None:
    allowed = await answer(SlotAdmission(client), slotted_pod(namespace), **change)
    assert allowed["allowed"]
    assert "patch" not in allowed


async def test_an_api_server_makes_no_pod_without_its_claims(
    server: ApiServer, client: KnativeClient, namespace: str, tmp_path: Path
) -> None:
    certificate = write_certificate(tmp_path)
    async with serve_admission(0, tmp_path, None, SlotAdmission(client)) as port:
        webhook = {
            "name": "slots.rlhfless.io",
            "clientConfig": {
                "url": f"https://localhost:{port}{SLOTS_PATH}",
                "caBundle": base64.b64encode(certificate).decode(),
            },
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "objectSelector": {"matchExpressions": [{"key": "rlhfless.io/takes-turns", "operator": "Exists"}]},
            "failurePolicy": "Fail",
            "sideEffects": "NoneOnDryRun",
            "admissionReviewVersions": ["v1"],
        }
        path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
        body = {"metadata": {"name": "slots"}, "webhooks": [webhook]}
        status, made = await asyncio.to_thread(server.request, "POST", path, body)
        assert status == 201, made
        pods = client.resource(PODS)
        refused = ""
        async with asyncio.timeout(60):
            # The API server takes a moment to heed a new configuration.
            while "no 1 slots" not in refused:
                try:
                    await pods.create(slotted_pod(namespace))
                except ForbiddenError as error:
                    refused = error.message
                await asyncio.sleep(0.1)
        await client.resource(CLAIMS).create(claim(namespace, "default", "gpu.test", 0, 0))
        created = (await pods.create(slotted_pod(namespace))).model_dump(by_alias=True)
        assert list(created["spec"]["resourceClaims"]) == [
            {"name": "rlhfless-default-0-0", "resourceClaimName": "rlhfless-default-0-0"}
        ]
        assert created["spec"]["containers"][0]["resources"]["claims"] == [{"name": "rlhfless-default-0-0"}]
    with pytest.raises(Exception, match="failed calling webhook"):
        await pods.create(slotted_pod(namespace))
