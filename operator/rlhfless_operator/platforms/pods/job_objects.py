"""The objects of a job's functions: Services, the token's Secret, the NetworkPolicies."""

import asyncio
import base64
import contextlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import Field

from rlhfless_operator.job.charged import Function
from rlhfless_operator.knative import (
    ApiError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Kind,
    KnativeClient,
    KubernetesObject,
    NotFoundError,
    ResourceClient,
    Service,
    UnavailableError,
)
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods import manifests
from rlhfless_operator.platforms.pods.environment_manifests import (
    EnvironmentFunction,
    environment_policy,
    environment_policy_name,
    environment_service,
)
from rlhfless_operator.platforms.pods.manifests import JobIdentity, Manifest, StageFunction
from rlhfless_operator.platforms.pods.shelter_manifests import ShelterFunction, shelter_service

_POLL_SECONDS = 0.1
Object = TypeVar("Object", bound=KubernetesObject)


class Secret(KubernetesObject):
    """A Secret."""

    data: dict[str, str] = Field(default_factory=dict)


SECRETS = Kind("", "v1", "secrets", Secret)
POLICIES = Kind("networking.k8s.io", "v1", "networkpolicies", KubernetesObject)


@dataclass(frozen=True)
class Endpoint:
    """The address of a stage's requests, and the Revision that sets its number of pods."""

    url: str
    host: str | None
    """The `Host` header, if it differs from the URL's host."""
    revision: str
    """Name of the Revision."""
    address: str
    """The Service's own address in the cluster."""


class JobObjects:
    """The objects of one job.

    Args:
        functions: its stages.
        environment: the servers of its environment, if it runs them.
        shelter: the process that keeps episodes while actors are let go, if the job may have one.
        patience: seconds to wait for Knative to create Revisions, and for the garbage collector to remove objects of an
            earlier job with the same name.
    """

    def __init__(
        self,
        client: KnativeClient,
        job: JobIdentity,
        functions: Sequence[StageFunction],
        settings: ClusterSettings,
        environment: EnvironmentFunction | None = None,
        shelter: ShelterFunction | None = None,
        *,
        patience: float = 60.0,
    ) -> None:
        self._services = client.services
        self._secrets: ResourceClient[Secret] = client.resource(SECRETS)
        self._policies: ResourceClient[KubernetesObject] = client.resource(POLICIES)
        self._job = job
        self._functions = functions
        self._settings = settings
        self._environment = environment
        self._shelter = shelter
        self._patience = patience

    async def create(self) -> tuple[str, Mapping[Function, Endpoint]]:
        """Create missing objects, update the others, and wait until Knative has Revisions. Return the job's token, and
        its functions' endpoints.

        Raises:
            PlatformUnavailableError: an object can't be created; the message has the reason and the remedy.
        """
        try:
            async with asyncio.timeout(self._patience):
                token = await self._token()
                connects_to = {url for function in self._functions for url in function.connects_to}
                policy = manifests.network_policy(self._job, self._settings, connects_to)
                await self._apply(self._policies, policy)
                for function in self._functions:
                    if function.instances > 1 or function.relays:
                        await self._apply(self._policies, manifests.gang_policy(function, self._settings))
                served: dict[Function, Manifest] = {
                    each.stage: manifests.service(each, self._settings) for each in self._functions
                }
                if self._environment is not None:
                    await self._apply(self._policies, environment_policy(self._job, self._settings))
                    served["environment"] = environment_service(self._environment, self._settings)
                if self._shelter is not None:
                    served["shelter"] = shelter_service(self._shelter, self._settings)
                async with asyncio.TaskGroup() as tasks:
                    making = {stage: tasks.create_task(self._serve(manifest)) for stage, manifest in served.items()}
            return token, {stage: task.result() for stage, task in making.items()}
        except BaseExceptionGroup as errors:
            raise _explained(errors.exceptions[0], self._job, self._settings) from errors
        except (ApiError, TimeoutError) as error:
            raise _explained(error, self._job, self._settings) from error

    async def remove(self) -> None:
        """Delete the Services and the NetworkPolicies. The Secret stays as long as the job, which needs it after a
        suspension.

        Raises:
            PlatformUnavailableError: the API server does not answer, or refuses.
        """
        job = self._job.name
        policies = (
            manifests.policy_name(job),
            environment_policy_name(job),
            manifests.gang_policy_name(job, "learning"),
            manifests.gang_policy_name(job, "generation"),
        )
        others: tuple[Function, ...] = ("environment", "shelter")
        services = (*(each.name for each in self._functions), *(manifests.service_name(job, each) for each in others))
        try:
            await asyncio.gather(
                *(self._delete(self._services, name) for name in services),
                *(self._delete(self._policies, name) for name in policies),
            )
        except ApiError as error:
            raise _explained(error, self._job, self._settings) from error

    async def _delete(self, resources: ResourceClient[Object], name: str) -> None:
        """Delete an object of this job. One of somebody else with its name stays."""
        with contextlib.suppress(NotFoundError, ConflictError):
            found = await resources.get(self._job.namespace, name)
            if any(owner.uid == self._job.uid for owner in found.metadata.owner_references):
                await resources.delete(self._job.namespace, name, uid=found.metadata.uid)

    async def _token(self) -> str:
        name = manifests.secret_name(self._job.name)
        manifest = manifests.token_secret(self._job, secrets.token_urlsafe(32))
        while True:
            try:
                found = await self._secrets.get(self._job.namespace, name)
                if self._is_ours(found):
                    return base64.b64decode(found.data[manifests.TOKEN_KEY]).decode()
            except NotFoundError:
                # Another process may have created it, or an answer may be lost: read the existing one.
                with contextlib.suppress(ConflictError):
                    await self._secrets.create(manifest)
                continue
            await asyncio.sleep(_POLL_SECONDS)

    async def _serve(self, manifest: Manifest) -> Endpoint:
        applied = await self._apply(self._services, manifest)
        while (endpoint := self._endpoint(applied)) is None:
            await asyncio.sleep(_POLL_SECONDS)
            applied = await self._services.get(self._job.namespace, applied.metadata.name)
        return endpoint

    async def _apply(self, resources: ResourceClient[Object], manifest: Manifest) -> Object:
        """Apply the manifest, once no object of another job with the same name is in its place."""
        while True:
            try:
                found = await resources.get(self._job.namespace, manifest["metadata"]["name"])
            except NotFoundError:
                break
            if self._is_ours(found):
                break
            await asyncio.sleep(_POLL_SECONDS)
        return await resources.apply(manifest)

    def _is_ours(self, found: KubernetesObject) -> bool:
        """Return whether an object is this job's. One that is being deleted, or another job's, must be gone first.

        Raises:
            PlatformUnavailableError: the object will not be deleted.
        """
        owners = found.metadata.owner_references
        if any(owner.uid == self._job.uid for owner in owners):
            return found.metadata.deletion_timestamp is None
        if not owners:
            raise PlatformUnavailableError(
                f"{found.metadata.name} in namespace {self._job.namespace} was not created by rlhfless; rename or"
                f" delete it, or give the job another name"
            )
        return False

    def _endpoint(self, service: Service) -> Endpoint | None:
        """Return the address of a Service; None while Knative still works on it.

        Raises:
            PlatformUnavailableError: Knative reports that it can't serve it.
        """
        status = service.status
        ready = service.ready
        served_before = status.latest_ready_revision_name == status.latest_created_revision_name is not None
        if ready is not None and ready.status == "False" and not served_before:
            raise PlatformUnavailableError(
                f"Knative can't serve {service.metadata.name}: {ready.reason}: {ready.message}"
            )
        url = (status.address and status.address.url) or status.url
        revision = status.latest_created_revision_name
        # With an initial scale of 1, readiness needs a pod, which may have to pull its image. Requests wait for that.
        settled = ready is not None and (ready.status == "True" or served_before or self._settings.initial_scale == 1)
        if not settled or url is None or revision is None:
            return None
        if self._settings.ingress is None:
            return Endpoint(url, None, revision, url)
        return Endpoint(self._settings.ingress.rstrip("/"), urlsplit(url).netloc, revision, url)


def _explained(error: BaseException, job: JobIdentity, settings: ClusterSettings) -> PlatformUnavailableError:
    """Convert an error to one with a remedy."""
    where = f"namespace {job.namespace}"
    match error:
        case PlatformUnavailableError():
            return error
        case TimeoutError():
            text = (
                f"Knative does not serve {job.name}'s functions yet; see `kubectl describe ksvc -n {job.namespace}`:"
                f" Knative's controller in {settings.knative_namespace} may be down, or a job of the same name is still"
                f" being deleted"
            )
        # The server's messages for an unknown resource and an unknown group.
        case NotFoundError() if re.search("could not find the requested resource|page not found", error.message):
            text = "the cluster has no Knative Serving; install it (https://knative.dev/docs/install)"
        case NotFoundError() if "namespaces" in error.message:
            text = f"{where} does not exist: {error.message}"
        case ForbiddenError() if "exceeded quota" in error.message:
            text = f"a quota of {where} is used up: {error.message}; raise it, or end other jobs"
        case ForbiddenError() if "being terminated" in error.message:
            text = f"{where} is being deleted: {error.message}"
        case ForbiddenError():
            text = f"the operator lacks a permission in {where}: {error.message}; grant it, as the chart does"
        case InvalidError():
            text = _refusal(error.message, settings)
        case UnavailableError():
            text = error.message
        case _:
            text = str(error)
    return PlatformUnavailableError(text)


def _refusal(message: str, settings: ClusterSettings) -> str:
    """Return Knative's message about a Service that it refuses, with the remedy if a setting allows it."""
    said = message.rpartition("denied the request: ")[2].removeprefix("validation failed: ")
    if "field not declared in schema" in said:
        field = said.rpartition("Kind=Service): ")[2]
        return f"Knative refuses the pods: {field}; remove it from the `template` of the job's pods"
    configuration = f"ConfigMap config-{{}} of {settings.knative_namespace}"
    if "must not set the field" in said or "feature is disabled" in said.lower():
        return (
            f"Knative refuses the pods: {said}; enable the field's flag in the {configuration.format('features')}"
            f" (`rlhfless preflight` names it), or remove it from the job's pods"
        )
    if "timeoutSeconds" in said:
        return (
            f"Knative refuses the pods: {said}; raise max-revision-timeout-seconds in the"
            f" {configuration.format('defaults')}, or lower RLHFLESS_REQUEST_TIMEOUT"
        )
    if "initial-scale" in said:
        return (
            f"Knative refuses the pods: {said}; set allow-zero-initial-scale in the"
            f" {configuration.format('autoscaler')}, or RLHFLESS_INITIAL_SCALE to 1"
        )
    return f"Knative refuses the pods: {said}"
