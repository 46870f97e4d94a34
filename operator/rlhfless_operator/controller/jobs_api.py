"""The controller's own requests for its jobs, all in one place and counted."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, CustomObjectsApi, V1DeleteOptions, V1Preconditions

from rlhfless_operator.job.generated.crd import GROUP, PLURAL, VERSION

_TIMEOUT_SECONDS = 30.0


class ResourceGoneError(Exception):
    """The resource has been deleted."""


class ConflictError(Exception):
    """The resource is no longer at the version that the request names."""


class ApiError(Exception):
    """The API server did not answer, or refused the request; a later retry may succeed."""


class JobsApi:
    """RLHFJobs on the API server.

    Args:
        client: client of the cluster; the caller closes it.
        on_request: called with the verb of every request.
    """

    def __init__(self, client: ApiClient, on_request: Callable[[str], None] = lambda verb: None) -> None:
        self._objects = CustomObjectsApi(client)
        self._on_request = on_request

    async def patch_status(self, namespace: str, name: str, version: str, changes: dict[str, Any]) -> dict[str, Any]:
        """Change fields of the status (a merge patch) if the resource is still at `version`; returns the resource.

        Raises:
            ResourceGoneError, ConflictError, ApiError
        """
        body = {"metadata": {"resourceVersion": version}, "status": changes}
        return await self._ask(
            "patch",
            self._objects.patch_namespaced_custom_object_status(
                GROUP, VERSION, namespace, PLURAL, name, body, **_MERGE, _request_timeout=_TIMEOUT_SECONDS
            ),
        )

    async def get(self, namespace: str, name: str) -> dict[str, Any]:
        """Get the resource.

        Raises:
            ResourceGoneError, ApiError
        """
        return await self._ask(
            "get",
            self._objects.get_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, name, _request_timeout=_TIMEOUT_SECONDS
            ),
        )

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """Delete the resource, but not a newer one with the same name.

        Raises:
            ResourceGoneError, ConflictError, ApiError
        """
        options = V1DeleteOptions(preconditions=V1Preconditions(uid=uid), propagation_policy="Background")
        await self._ask(
            "delete",
            self._objects.delete_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, name, body=options, _request_timeout=_TIMEOUT_SECONDS
            ),
        )

    async def _ask(self, verb: str, request: Awaitable[object]) -> dict[str, Any]:
        self._on_request(verb)
        try:
            return cast("dict[str, Any]", await request)
        except ApiException as error:
            answer = f"{error.status} {error.reason}: {str(error.body or '')[:500]}"
            match error.status:
                case 404:
                    raise ResourceGoneError(answer) from error
                case 409:
                    raise ConflictError(answer) from error
                case _:
                    raise ApiError(answer) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(f"{type(error).__name__}: {error}") from error


_MERGE: dict[str, Any] = {"_content_type": "application/merge-patch+json"}
