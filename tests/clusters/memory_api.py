"""An API server in memory, for machines that have none: it keeps documents as the real one keeps those of an operator.

What is there: discovery, lists and watches, create, replace, merge and JSON patches, deletion with finalizers, the
status subresource, resourceVersion as a precondition, generation. What is not: schemas, defaults, CEL, permissions.
(PyPI's kmock knows no resourceVersion and no subresource, which are what an operator stands or falls with.)
"""

import asyncio
import base64
import copy
import json
import ssl
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonpatch
import yaml
from aiohttp import web

from tests.clusters.control_plane import ApiServer

Document = dict[str, Any]
Key = tuple[str, str, str]
"""Collection below all namespaces, namespace, name."""

_RESOURCES = {
    "api/v1": [("Namespace", "namespaces", False), ("Event", "events", True), ("Secret", "secrets", True)],
    "apis/networking.k8s.io/v1": [("NetworkPolicy", "networkpolicies", True)],
    "apis/coordination.k8s.io/v1": [("Lease", "leases", True)],
    "apis/rlhfless.io/v1alpha1": [("RLHFJob", "rlhfjobs", True)],
}


_KEPT = ("name", "namespace", "uid", "creationTimestamp", "generation", "deletionTimestamp")
"""Metadata that no client can change."""


class RefusedError(Exception):
    """An answer other than success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class MemoryApi:
    """The documents, and the rules for changing them."""

    def __init__(self) -> None:
        self._documents: dict[Key, Document] = {}
        self._version = 1
        self._events: list[tuple[int, str, str, Document]] = []
        self._happened = asyncio.Condition()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One request of any kind."""
        parts = request.path.strip("/").split("/")
        try:
            if (found := self._discovery(parts)) is not None:
                return web.json_response(found)
            head = 2 if parts[0] == "api" else 3
            collection, rest = "/".join(parts[:head]), parts[head:]
            if collection not in _RESOURCES:
                return web.Response(status=404, text="404 page not found\n")
            namespace = ""
            if rest[0] == "namespaces" and len(rest) > 2:
                namespace, rest = rest[1], rest[2:]
            collection = f"{collection}/{rest[0]}"
            body = await request.json() if request.can_read_body else None
            if request.method == "GET" and len(rest) == 1:
                if request.query.get("watch"):
                    return await self._watch(request, collection, namespace)
                return web.json_response(self._list(collection, namespace))
            if request.method == "POST":
                return web.json_response(await self._create(collection, namespace, body), status=201)
            subresource = rest[2] if len(rest) > 2 else ""
            key = (collection, namespace, rest[1])
            return web.json_response(await self._change(request, key, subresource, body))
        except RefusedError as error:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": error.status}
            return web.json_response({**status, "message": str(error)}, status=error.status)

    def _discovery(self, parts: list[str]) -> Document | None:
        path = "/".join(parts)
        if path == "api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            versions = [name.split("/")[1:] for name in _RESOURCES if name.startswith("apis/")]
            named = [(group, {"groupVersion": f"{group}/{version}", "version": version}) for group, version in versions]
            return {"groups": [{"name": group, "versions": [it], "preferredVersion": it} for group, it in named]}
        if path not in _RESOURCES:
            return None
        verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
        resources = []
        for kind, plural, namespaced in _RESOURCES[path]:
            entry = {"kind": kind, "singularName": kind.lower(), "namespaced": namespaced, "verbs": verbs}
            resources += [{**entry, "name": plural}, {**entry, "name": f"{plural}/status"}]
        return {"groupVersion": path.split("/", 1)[1], "resources": resources}

    def _list(self, collection: str, namespace: str) -> Document:
        items = [
            document
            for (of, within, _), document in self._documents.items()
            if of == collection and namespace in ("", within)
        ]
        return {"metadata": {"resourceVersion": str(self._version)}, "items": items}

    async def _watch(self, request: web.Request, collection: str, namespace: str) -> web.StreamResponse:
        seen = int(request.query.get("resourceVersion") or 0)
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            async with self._happened:
                news = [event for event in self._events if event[0] > seen and event[2] == collection]
                if not news:
                    await self._happened.wait()
                    continue
            for version, kind, _, document in news:
                seen = version
                if namespace in ("", document["metadata"].get("namespace", "")):
                    try:
                        await response.write(json.dumps({"type": kind, "object": document}).encode() + b"\n")
                    except ConnectionResetError:  # The client has gone.
                        return response

    async def _create(self, collection: str, namespace: str, document: Document) -> Document:
        metadata = document.setdefault("metadata", {})
        metadata.setdefault("name", metadata.get("generateName", "") + uuid.uuid4().hex[:8])
        key = (collection, namespace, metadata["name"])
        if key in self._documents:
            raise RefusedError(409, f"{metadata['name']} already exists")
        metadata |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": _now()}
        if namespace:
            metadata["namespace"] = namespace
        document.pop("status", None)
        for name, text in document.pop("stringData", {}).items():
            document.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
        return await self._store(key, document, "ADDED")

    async def _change(self, request: web.Request, key: Key, subresource: str, body: Any) -> Document:
        if key not in self._documents:
            if request.content_type == "application/apply-patch+yaml":
                return await self._create(*key[:2], body)
            raise RefusedError(404, f"{key[2]} not found")
        before = self._documents[key]
        match request.method:
            case "GET":
                return before
            case "DELETE":
                return await self._delete(key, before, body or {})
            case "PUT":
                after = body
            case _ if isinstance(body, list):
                try:
                    after = jsonpatch.apply_patch(before, body)
                except jsonpatch.JsonPatchException as error:
                    raise RefusedError(422, f"the patch does not apply: {error}") from error
            case _:
                after = merge(before, body)
        wanted = (body.get("metadata") or {}).get("resourceVersion") if isinstance(body, dict) else None
        if wanted not in (None, before["metadata"]["resourceVersion"]):
            raise RefusedError(409, "the object has been modified")
        return await self._replace(key, before, after, subresource)

    async def _replace(self, key: Key, before: Document, after: Document, subresource: str) -> Document:
        after = copy.deepcopy(after)
        if subresource == "status":
            after = {**copy.deepcopy(before), "status": after.get("status", {})}
        else:
            after["metadata"] |= {name: before["metadata"][name] for name in _KEPT if name in before["metadata"]}
            for name in ("finalizers", "annotations"):
                if not after["metadata"].get(name):
                    after["metadata"].pop(name, None)
            if "status" in before:
                after["status"] = copy.deepcopy(before["status"])
        after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if after == before:
            return before
        if after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] += 1
        if after["metadata"].get("deletionTimestamp") and not after["metadata"].get("finalizers"):
            del self._documents[key]
            return await self._tell(key, after, "DELETED")
        return await self._store(key, after, "MODIFIED")

    async def _delete(self, key: Key, before: Document, options: Document) -> Document:
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted not in (None, before["metadata"]["uid"]):
            raise RefusedError(409, "another object has the name now")
        after = copy.deepcopy(before)
        if after["metadata"].get("finalizers"):
            after["metadata"].setdefault("deletionTimestamp", _now())
            return await self._store(key, after, "MODIFIED")
        del self._documents[key]
        return await self._tell(key, after, "DELETED")

    async def _store(self, key: Key, document: Document, kind: str) -> Document:
        self._documents[key] = document
        return await self._tell(key, document, kind)

    async def _tell(self, key: Key, document: Document, kind: str) -> Document:
        self._version += 1
        document["metadata"]["resourceVersion"] = str(self._version)
        async with self._happened:
            self._events.append((self._version, kind, key[0], copy.deepcopy(document)))
            self._happened.notify_all()
        return document


def merge(before: Any, change: Any) -> Any:
    """RFC 7386."""
    if not isinstance(change, dict):
        return change
    after = dict(before) if isinstance(before, dict) else {}
    for name, value in change.items():
        if value is None:
            after.pop(name, None)
        else:
            after[name] = merge(after.get(name), value)
    return after


@contextmanager
def memory_api(folder: Path) -> Iterator[ApiServer]:
    """A server in a thread of its own."""
    loop = asyncio.new_event_loop()
    runner: list[web.AppRunner] = []
    port: list[int] = []
    ready = threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", MemoryApi().answer)
        runner.append(web.AppRunner(app, access_log=None, shutdown_timeout=0.1))
        await runner[0].setup()
        await web.TCPSite(runner[0], "127.0.0.1", 0).start()
        port.append(runner[0].addresses[0][1])
        ready.set()

    async def end_watches() -> None:
        watches = asyncio.all_tasks() - {asyncio.current_task()}
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()
        loop.run_until_complete(runner[0].cleanup())
        loop.run_until_complete(end_watches())
        loop.close()

    thread = threading.Thread(target=run, name="memory-api")
    thread.start()
    ready.wait()
    url = f"http://127.0.0.1:{port[0]}"
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "it",
                "clusters": [{"name": "it", "cluster": {"server": url}}],
                "users": [{"name": "it", "user": {"token": "anything"}}],
                "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            }
        )
    )
    try:
        yield ApiServer(url, "anything", kubeconfig, ssl.create_default_context())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
