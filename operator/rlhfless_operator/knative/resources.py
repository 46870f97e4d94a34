"""One kind of object on an API server: get, list, apply, create, patch, delete and watch."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlhfless_operator.knative.errors import NotFoundError
from rlhfless_operator.knative.models import KubernetesObject
from rlhfless_operator.knative.transport import APPLY_PATCH, MERGE_PATCH, Transport
from rlhfless_operator.knative.watching import Listing, WatchEvent, follow

_PAGE = 500

Object = TypeVar("Object", bound=KubernetesObject)


@dataclass(frozen=True)
class Kind(Generic[Object]):
    """A kind of object on an API server."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    model: type[Object]
    """The model that objects are parsed into."""

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of the collection in a namespace (in all if None), of an object in it, or of its
        subresource."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


class ResourceClient(Generic[Object]):
    """Objects of one kind.

    Every method raises `ApiError` or one of its kinds: `NotFoundError`, `ConflictError`, `ForbiddenError`,
    `InvalidError`, `UnavailableError`.

    Args:
        field_manager: the field manager of server-side apply.
    """

    def __init__(self, transport: Transport, kind: Kind[Object], *, field_manager: str) -> None:
        self._transport = transport
        self._kind = kind
        self._field_manager = field_manager

    async def get(self, namespace: str | None, name: str) -> Object:
        """Get the object.

        Args:
            namespace: None for a cluster-scoped object.
        """
        return self._read(await self._transport.get(self._kind.path(namespace, name)))

    async def list(
        self, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> Listing[Object]:
        """List the objects of a namespace, or of all namespaces, with the resource version to watch from."""
        items: list[Object] = []
        query = {"limit": str(_PAGE), **_selecting(label_selector, field_selector)}
        while True:
            answer = await self._transport.send("list", "GET", self._kind.path(namespace), query=query)
            items += [self._read(item) for item in answer["items"]]
            metadata = answer.get("metadata", {})
            if not metadata.get("continue"):
                return Listing(items, metadata.get("resourceVersion", ""))
            query = {**query, "continue": metadata["continue"]}

    async def apply(self, manifest: Mapping[str, Any], *, force: bool = True, dry_run: bool = False) -> Object:
        """Create or update the object by server-side apply.

        Args:
            manifest: with `apiVersion`, `kind`, `metadata.name` and, for namespaced kinds, `metadata.namespace`.
            force: take fields over from other managers.
            dry_run: check only, admission webhooks included.
        """
        metadata = manifest["metadata"]
        query = {"fieldManager": self._field_manager, "force": str(force).lower()}
        path = self._kind.path(metadata.get("namespace"), metadata["name"])
        answer = await self._transport.send(
            "apply", "PATCH", path, query=query | _dry(dry_run), body=manifest, content_type=APPLY_PATCH
        )
        return self._read(answer)

    async def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Create the object. Raises `ConflictError` if one with its name exists. The request is never retried."""
        answer = await self._transport.send(
            "create",
            "POST",
            self._kind.path(manifest["metadata"].get("namespace")),
            query={"fieldManager": self._field_manager} | _dry(dry_run),
            body=manifest,
            repeat=False,
        )
        return self._read(answer)

    async def patch(
        self, namespace: str | None, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Object:
        """Merge `patch` into the object: None removes a field, lists are replaced.

        With `metadata.resourceVersion` in it, only if the object is still at that version (`ConflictError`).
        """
        path = self._kind.path(namespace, name, subresource)
        query = {"fieldManager": self._field_manager}
        return self._read(
            await self._transport.send("patch", "PATCH", path, query=query, body=patch, content_type=MERGE_PATCH)
        )

    async def delete(
        self, namespace: str | None, name: str, *, uid: str | None = None, grace_period_seconds: int | None = None
    ) -> bool:
        """Delete the object; False if there was none.

        Args:
            uid: uid of the object; `ConflictError` if another object has its name now.
            grace_period_seconds: grace period of a pod; by default its own setting.
        """
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_period_seconds is not None:
            options["gracePeriodSeconds"] = grace_period_seconds
        try:
            await self._transport.send("delete", "DELETE", self._kind.path(namespace, name), body=options)
        except NotFoundError:
            return False
        return True

    def watch(
        self, namespace: str | None = None, *, label_selector: str = ""
    ) -> AsyncGenerator[WatchEvent[Object], None]:
        """Yield all objects, and then every change, without end.

        It begins with an `added` event for each object and one `synced`. It survives failures of the API server and of
        the connection: it then lists the objects again, and yields the missed changes as events. Close the generator to
        end it.
        """
        path = self._kind.path(namespace)
        return follow(
            lambda: self.list(namespace, label_selector=label_selector),
            lambda query, seconds: self._transport.lines(path, {**query, **_selecting(label_selector)}, seconds),
            self._read,
        )

    def _read(self, content: Mapping[str, Any]) -> Object:
        return self._kind.model.model_validate(content)


def _selecting(label_selector: str, field_selector: str = "") -> dict[str, str]:
    selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
    return {name: selector for name, selector in selectors.items() if selector}


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dryRun": "All"} if dry_run else {}
