"""The client: Knative's three kinds, and any other."""

from collections.abc import Callable
from typing import TypeVar

from kubernetes.aio.client import ApiClient

from rlhfless_operator.knative.models import Configuration, KubernetesObject, Revision, Service
from rlhfless_operator.knative.resources import Kind, ResourceClient
from rlhfless_operator.knative.transport import Transport

GROUP = "serving.knative.dev"
SERVICES = Kind(GROUP, "v1", "services", Service)
REVISIONS = Kind(GROUP, "v1", "revisions", Revision)
CONFIGURATIONS = Kind(GROUP, "v1", "configurations", Configuration)

Object = TypeVar("Object", bound=KubernetesObject)


class KnativeClient:
    """Knative Serving on one cluster.

    Args:
        api: the official client, with the cluster's configuration; the caller closes it.
        field_manager: name of the manager of changed fields, as in `kubectl get --show-managed-fields`.
        patience: seconds to retry a request while the API server is unavailable.
        on_request: called with the verb of every attempt of a request.
    """

    def __init__(
        self,
        api: ApiClient,
        *,
        field_manager: str,
        patience: float = 30.0,
        on_request: Callable[[str], None] = lambda verb: None,
    ) -> None:
        self._transport = Transport(api, patience=patience, on_request=on_request)
        self._field_manager = field_manager
        self.services: ResourceClient[Service] = self.resource(SERVICES)
        self.revisions: ResourceClient[Revision] = self.resource(REVISIONS)
        self.configurations: ResourceClient[Configuration] = self.resource(CONFIGURATIONS)

    def resource(self, kind: Kind[Object]) -> ResourceClient[Object]:
        """Return the client of another kind's objects, over the same connection."""
        return ResourceClient(self._transport, kind, field_manager=self._field_manager)
