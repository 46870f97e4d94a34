"""A small typed client of Knative Serving, over the asyncio half of the official `kubernetes` package.

    async with ApiClient(configuration) as api:
        client = KnativeClient(api, field_manager="my-tool")
        service = await client.services.apply(manifest)
        async for event in client.revisions.watch("default", label_selector="serving.knative.dev/service=name"):
            ...

For other kinds, define a `Kind`: `client.resource(Kind("", "v1", "pods", Pod))`. This package does not depend on
rlhfless.

- `client`: the client. `models`: Knative's kinds. `resources`: the requests for objects of one kind.
- `transport`: send requests. `watching`: watch without end. `errors`: the errors of the API server.
"""

from rlhfless_operator.knative.client import KnativeClient
from rlhfless_operator.knative.errors import (
    ApiError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    UnavailableError,
)
from rlhfless_operator.knative.models import (
    Condition,
    Configuration,
    KubernetesModel,
    KubernetesObject,
    ObjectMeta,
    OwnerReference,
    Revision,
    Service,
)
from rlhfless_operator.knative.resources import Kind, ResourceClient
from rlhfless_operator.knative.transport import Transport
from rlhfless_operator.knative.watching import Listing, WatchEvent
