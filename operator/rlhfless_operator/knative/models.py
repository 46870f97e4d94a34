"""Knative's kinds, with the fields that clients read. Unknown fields are kept."""

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class KubernetesModel(BaseModel):
    """A part of an object: frozen, in camelCase when serialized. Unknown fields are kept."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="allow", frozen=True)


class OwnerReference(KubernetesModel):
    """The owner of an object. Deleting the owner deletes the object."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
    block_owner_deletion: bool = False


class ObjectMeta(KubernetesModel):
    """An object's metadata."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []


class KubernetesObject(KubernetesModel):
    """Any object."""

    metadata: ObjectMeta = ObjectMeta()


class Condition(KubernetesModel):
    """One aspect of an object's state."""

    type: str
    status: str = "Unknown"
    """`True`, `False` or `Unknown`."""
    reason: str = ""
    message: str = ""
    severity: str = ""


class Conditions(KubernetesModel):
    """The part of a status that all Knative kinds share."""

    conditions: list[Condition] = []
    observed_generation: int = 0

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of this type, if there is one."""
        return next((condition for condition in self.conditions if condition.type == kind), None)


class Address(KubernetesModel):
    """Address of a Service inside its cluster."""

    url: str | None = None


class ServiceStatus(Conditions):
    """The status of a Service."""

    url: str | None = None
    address: Address | None = None
    latest_created_revision_name: str | None = None
    latest_ready_revision_name: str | None = None


class Service(KubernetesObject):
    """`serving.knative.dev/v1` Service: a Configuration and a Route of one name."""

    spec: dict[str, Any] = {}
    status: ServiceStatus = ServiceStatus()

    @property
    def observed(self) -> bool:
        """Whether the status describes the current spec."""
        return self.status.observed_generation >= self.metadata.generation

    @property
    def ready(self) -> Condition | None:
        """The Ready condition, once it describes the current spec."""
        return self.status.condition("Ready") if self.observed else None


class ConfigurationStatus(Conditions):
    """The Revisions of a Configuration."""

    latest_created_revision_name: str | None = None
    latest_ready_revision_name: str | None = None


class Configuration(KubernetesObject):
    """`serving.knative.dev/v1` Configuration: the template that Revisions are stamped from."""

    spec: dict[str, Any] = {}
    status: ConfigurationStatus = ConfigurationStatus()


class RevisionStatus(Conditions):
    """The status of a Revision."""

    actual_replicas: int = 0
    desired_replicas: int = 0


class Revision(KubernetesObject):
    """`serving.knative.dev/v1` Revision: an immutable template, and the pods that serve it. Its spec can't be changed;
    the scale annotations in its metadata can."""

    spec: dict[str, Any] = {}
    status: RevisionStatus = RevisionStatus()
