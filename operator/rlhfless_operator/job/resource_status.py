"""The custom resource's status: the progress of training from the job's folder, and what only the cluster knows."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from rlhfless_functions.settings import Settings
from rlhfless_operator.records.status import RLHFJobStatus

ConditionType = Literal[
    "Accepted",
    "ClusterReady",
    "ServicesReady",
    "PodsHealthy",
    "Progressing",
    "StepsTeach",
    "EngineAgrees",
    "Suspended",
    "Complete",
    "Failed",
]


class Condition(Settings):
    """A condition of the job, as Kubernetes defines conditions."""

    type: ConditionType
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: str = ""
    """The reason, in one word for programs."""
    message: str = Field(default="", max_length=32768)
    """The reason, in a sentence for people, with the remedy if there is one."""
    last_transition_time: str = ""
    """Time when the status of this condition last changed."""
    observed_generation: int = 0
    """Generation of the resource that the condition describes."""


class DriverStatus(Settings):
    """The operator process that runs the job."""

    operator: str
    """Identity of the operator process."""
    lease: int
    """Number of its lease in the job's folder."""


class ResourceStatus(RLHFJobStatus):
    """The job's progress, as the operator publishes it."""

    observed_generation: int = 0
    """Generation of the resource that this status describes."""
    stages: str = ""
    """The job's current activity, as `kubectl get` shows it. Of several running stages all are named with their steps,
    such as `generation 13 · learning 12`."""
    progress: str = ""
    """Finished steps out of all steps of the job, such as `41/200`."""
    budget: str = ""
    """Spent part of `spec.budget`, such as `42%`."""
    reason: str = ""
    """Reason of the condition that currently matters most."""
    restarts: int = 0
    """Consecutive restarts after internal failures, without a finished step in between."""
    start_time: str | None = None
    """Time when the job first ran."""
    completion_time: str | None = None
    """Time when the job succeeded or failed."""
    driver: DriverStatus | None = None
    """The operator process that runs the job, or ran it last."""
    conditions: list[Condition] = Field(
        default=[],
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions of the job, one of each type."""

    @property
    def settled(self) -> bool:
        """Whether this generation of the job has ended."""
        return self.phase in ("Succeeded", "Failed")


def read_resource_status(content: Mapping[str, Any] | None) -> ResourceStatus:
    """Read the fields of a resource's status that this release knows; an empty status if it can't be read.

    Nothing is lost: the job's folder holds the progress of training.
    """
    names = {field.alias for field in ResourceStatus.model_fields.values()}
    known = {name: value for name, value in (content or {}).items() if name in names}
    try:
        return ResourceStatus.model_validate(known, by_name=False)
    except ValidationError:
        return ResourceStatus()


_DIGITS = {
    "reward": 4,
    "bestEvaluation": 4,
    "seconds": 3,
    "instanceSeconds": 3,
    "gpuSeconds": 3,
    "budgetUsed": 4,
    "idleSeconds": 1,
}
"""Digits after the point."""


def dump_resource_status(status: ResourceStatus) -> dict[str, Any]:
    """Return the status as the API server stores it: without nulls, and with rounded numbers."""
    content: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    for name, digits in _DIGITS.items():
        if name in content:
            content[name] = round(content[name], digits)
    return content


def changes_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch from one status to another. Removed fields are null, and lists are replaced whole."""
    changes: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            if inner := changes_of(old, value):
                changes[name] = inner
        elif old != value:
            changes[name] = value
    return changes
