"""The Knative client: against a real API server with Knative's kinds, and on a real cluster with Knative itself."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from rlhfless_operator.knative import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    KnativeClient,
    KubernetesObject,
    Listing,
    NotFoundError,
    UnavailableError,
    WatchEvent,
)
from rlhfless_operator.knative.errors import GoneError, error_of
from rlhfless_operator.knative.watching import follow
from tests.clusters.control_plane import ApiServer
from tests.clusters.knative_definitions import NAMESPACES, api_client, knative_server
from tests.clusters.server_door import ServerDoor
from tests.prerequisites import needs_api_server, needs_cluster

with_api_server = needs_api_server("the client meets no API server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with knative_server(tmp_path_factory.mktemp("control-plane")) as server:
        yield server


@asynccontextmanager
async def client_of(server: ApiServer, door: ServerDoor | None = None, **options: Any) -> AsyncIterator[KnativeClient]:
    async with api_client(server) as api:
        if door is not None:
            api.configuration.host = f"https://127.0.0.1:{door.port}"
        yield KnativeClient(api, field_manager="tests", **options)


@asynccontextmanager
async def a_namespace(client: KnativeClient) -> AsyncIterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    namespaces = client.resource(NAMESPACES)
    await namespaces.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    await namespaces.delete(None, name)


def a_service(namespace: str, name: str = "hello", **annotations: str) -> dict[str, Any]:
    container = {"image": "dev.local/none:1"}
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": {"team": name}},
        "spec": {
            "template": {
                "metadata": {"annotations": {"autoscaling.knative.dev/initial-scale": "0", **annotations}},
                "spec": {"containers": [container]},
            }
        },
    }


# --- objects ---


@with_api_server
async def test_objects_are_made_changed_and_deleted(server: ApiServer) -> None:
    async with client_of(server) as client, a_namespace(client) as namespace:
        made = await client.services.apply(a_service(namespace))
        assert (made.metadata.name, made.metadata.generation, made.observed) == ("hello", 1, False)
        assert await client.services.get(namespace, "hello") == made
        again = await client.services.apply(a_service(namespace))
        assert again.metadata.resource_version == made.metadata.resource_version
        changed = await client.services.patch(namespace, "hello", {"metadata": {"labels": {"team": None, "a": "b"}}})
        assert changed.metadata.labels == {"a": "b"}
        assert await client.services.delete(namespace, "hello", uid=made.metadata.uid)
        assert not await client.services.delete(namespace, "hello")
        with pytest.raises(NotFoundError):
            await client.services.get(namespace, "hello")


@with_api_server
async def test_the_status_is_read_by_name(server: ApiServer) -> None:
    async with client_of(server) as client, a_namespace(client) as namespace:
        await client.services.apply(a_service(namespace))
        status = {
            "observedGeneration": 1,
            "address": {"url": "http://hello.test"},
            "latestCreatedRevisionName": "hello-00001",
            "conditions": [{"type": "Ready", "status": "False", "reason": "RevisionMissing", "message": "m"}],
            "traffic": [{"percent": 100}],
        }
        service = await client.services.patch(namespace, "hello", {"status": status}, subresource="status")
        assert service.status.address is not None
        assert service.status.address.url == "http://hello.test"
        assert service.status.latest_created_revision_name == "hello-00001"
        assert service.ready is not None
        assert (service.ready.status, service.ready.reason) == ("False", "RevisionMissing")
        # What the client does not know of is kept.
        assert service.status.model_dump(by_alias=True)["traffic"] == [{"percent": 100}]


@with_api_server
async def test_a_dry_run_changes_nothing(server: ApiServer) -> None:
    async with client_of(server) as client, a_namespace(client) as namespace:
        await client.services.apply(a_service(namespace), dry_run=True)
        assert (await client.services.list(namespace)).items == []


@with_api_server
async def test_lists_come_whole_and_by_label(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfless_operator.knative.resources._PAGE", 2)
    async with client_of(server) as client, a_namespace(client) as namespace:
        for number in range(5):
            await client.services.apply(a_service(namespace, f"s{number}"))
        listing = await client.services.list(namespace)
        assert [service.metadata.name for service in listing.items] == ["s0", "s1", "s2", "s3", "s4"]
        selected = await client.services.list(namespace, label_selector="team=s3")
        assert [service.metadata.name for service in selected.items] == ["s3"]


@with_api_server
async def test_refusals_have_names(server: ApiServer) -> None:
    async with client_of(server) as client, a_namespace(client) as namespace:
        made = await client.services.create(a_service(namespace))
        with pytest.raises(ConflictError, match="AlreadyExists"):
            await client.services.create(a_service(namespace))
        stale = {"metadata": {"resourceVersion": "1", "labels": {"a": "b"}}}
        with pytest.raises(ConflictError):
            await client.services.patch(namespace, "hello", stale)
        with pytest.raises(ConflictError):
            await client.services.delete(namespace, "hello", uid="another")
        with pytest.raises(InvalidError):
            await client.services.create(a_service(namespace, "No Name"))
        assert (await client.services.get(namespace, "hello")).metadata.uid == made.metadata.uid


@with_api_server
async def test_whoever_has_no_rights_is_told_which(server: ApiServer) -> None:
    async with api_client(server) as api:
        api.configuration.api_key.clear()
        client = KnativeClient(api, field_manager="tests")
        with pytest.raises(ForbiddenError, match="cannot list resource"):
            await client.services.list("default")
        async with aclosing(client.services.watch("default")) as events:
            with pytest.raises(ForbiddenError):
                await anext(events)


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, b'{"code":400,"message":"admission webhook denied"}', InvalidError, "admission webhook denied"),
        (410, b'{"code":410,"reason":"Expired","message":"too old"}', GoneError, "too old"),
        (429, b"{}", UnavailableError, "429"),
        (503, b"upstream connect error", UnavailableError, "upstream connect error"),
        (500, b"[]", UnavailableError, "500"),
        (
            500,
            b'{"message":"failed to create typed patch object (a/b): .x: not declared"}',
            InvalidError,
            "not declared",
        ),
    ],
)
def test_every_answer_is_some_error(status: int, body: bytes, kind: type[Exception], words: str) -> None:
    error = error_of(status, body)
    assert type(error) is kind
    assert words in str(error)


# --- patience ---


@with_api_server
async def test_a_restart_of_the_api_server_is_waited_for(server: ApiServer) -> None:
    door = ServerDoor(server)
    await door.open()
    async with client_of(server) as admin, a_namespace(admin) as namespace, client_of(server, door) as client:
        await client.services.apply(a_service(namespace))
        await door.shut()
        asking = asyncio.create_task(client.services.patch(namespace, "hello", {"metadata": {"labels": {"a": "b"}}}))
        await asyncio.sleep(0.3)
        assert not asking.done()
        await door.open()
        assert (await asking).metadata.labels["a"] == "b"
        await door.shut()


@with_api_server
async def test_patience_ends(server: ApiServer) -> None:
    door = ServerDoor(server)
    await door.open()
    await door.shut()
    async with client_of(server, door, patience=0.2) as client:
        with pytest.raises(UnavailableError, match="the API server can't be reached"):
            await client.services.list("default")


# --- watching ---


async def next_change(events: AsyncGenerator[WatchEvent[Any], None]) -> tuple[str, str]:
    async with asyncio.timeout(120):
        event = await anext(events)
    return event.type, event.object.metadata.name if event.object else ""


@with_api_server
async def test_a_watch_tells_what_is_there_and_then_every_change(server: ApiServer) -> None:
    async with client_of(server) as client, a_namespace(client) as namespace:
        await client.services.apply(a_service(namespace, "a"))
        async with aclosing(client.services.watch(namespace)) as events:
            assert [await next_change(events) for _ in range(2)] == [("added", "a"), ("synced", "")]
            await client.services.apply(a_service(namespace, "b"))
            assert await next_change(events) == ("added", "b")
            await client.services.patch(namespace, "a", {"metadata": {"labels": {"c": "d"}}})
            assert await next_change(events) == ("modified", "a")
            await client.services.delete(namespace, "a")
            assert await next_change(events) == ("deleted", "a")


@with_api_server
async def test_a_watch_makes_good_what_it_missed(server: ApiServer) -> None:
    door = ServerDoor(server)
    await door.open()
    async with client_of(server) as admin, a_namespace(admin) as namespace, client_of(server, door) as client:
        for name in ("kept", "changed", "removed"):
            await admin.services.apply(a_service(namespace, name))
        async with aclosing(client.services.watch(namespace)) as events:
            assert {await next_change(events) for _ in range(4)} >= {("added", "kept"), ("synced", "")}
            await door.shut()
            await admin.services.patch(namespace, "changed", {"metadata": {"labels": {"c": "d"}}})
            await admin.services.delete(namespace, "removed")
            await admin.services.apply(a_service(namespace, "new"))
            await door.open()
            # By another listing, or by a watch that goes on from where the last one broke off.
            missed = []
            while len(missed) < 3:
                change = await next_change(events)
                if change[0] != "synced":
                    missed.append(change)
            assert sorted(missed) == [("added", "new"), ("deleted", "removed"), ("modified", "changed")]
        await door.shut()


def an_object(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version)}}


class ScriptedServer:
    """An API server whose watches end as the script says."""

    def __init__(self, listings: list[Listing[KubernetesObject]], watches: list[list[dict[str, Any]]]) -> None:
        self._listings = iter(listings)
        self._watches = iter(watches)
        self.versions: list[str] = []

    async def list_all(self) -> Listing[KubernetesObject]:
        return next(self._listings)

    async def lines(self, query: Mapping[str, str], seconds: float) -> AsyncGenerator[bytes, None]:
        assert query["allowWatchBookmarks"] == "true"
        self.versions.append(query["resourceVersion"])
        for line in next(self._watches):
            yield json.dumps(line).encode()

    def events(self) -> AsyncGenerator[WatchEvent[KubernetesObject], None]:
        return follow(self.list_all, self.lines, KubernetesObject.model_validate)


def listing(version: int, *objects: dict[str, Any]) -> Listing[KubernetesObject]:
    return Listing([KubernetesObject.model_validate(each) for each in objects], str(version))


async def test_a_watch_that_ends_goes_on_from_its_last_bookmark() -> None:
    server = ScriptedServer(
        [listing(5)],
        [
            [{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}],
            [{"type": "ADDED", "object": an_object("a", 12)}],
            [{"type": "DELETED", "object": an_object("a", 15)}],
        ],
    )
    async with aclosing(server.events()) as events:
        assert [await next_change(events) for _ in range(3)] == [("synced", ""), ("added", "a"), ("deleted", "a")]
    assert server.versions == ["5", "9", "12"]


async def test_an_expired_version_is_a_new_listing() -> None:
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    server = ScriptedServer(
        [listing(5, an_object("a", 3), an_object("b", 4)), listing(20, an_object("a", 3), an_object("c", 18))],
        [[gone], [{"type": "MODIFIED", "object": an_object("a", 21)}]],
    )
    async with aclosing(server.events()) as events:
        told = [await next_change(events) for _ in range(7)]
    assert told == [
        ("added", "a"), ("added", "b"), ("synced", ""), ("deleted", "b"), ("added", "c"), ("synced", ""),
        ("modified", "a"),
    ]  # fmt: skip


# --- a real cluster ---


@needs_cluster("no real Knative is asked")
async def test_real_knative_is_driven() -> None:
    from rlhfless_operator.controller.main import connect

    async with connect() as api:
        client = KnativeClient(api, field_manager="rlhfless-tests")
        async with a_namespace(client) as namespace:
            await client.services.apply(a_service(namespace))
            async with asyncio.timeout(120), aclosing(client.services.watch(namespace)) as events:
                async for event in events:
                    if event.object is not None and event.object.ready is not None:
                        service = event.object
                        if service.ready.status == "True":
                            break
            name = service.status.latest_ready_revision_name
            assert name is not None
            scale = {"autoscaling.knative.dev/min-scale": "0", "autoscaling.knative.dev/max-scale": "3"}
            revision = await client.revisions.patch(namespace, name, {"metadata": {"annotations": scale}})
            assert revision.metadata.annotations.items() >= scale.items()
            assert [each.metadata.name for each in (await client.configurations.list(namespace)).items] == ["hello"]
            with pytest.raises(InvalidError, match="denied the request"):
                await client.services.apply(a_service(namespace, **{"autoscaling.knative.dev/window": "nonsense"}))
