"""The custom resource's status: what the job's folder says of the training, and what only the cluster knows."""

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
    "Suspended",
    "Complete",
    "Failed",
]


class Condition(Settings):
    """One thing that is or is not so with a job."""

    type: ConditionType
    """What it is about."""
    status: Literal["True", "False", "Unknown"]
    """Whether it is so."""
    reason: str = ""
    """Why, in one word for programs."""
    message: str = Field(default="", max_length=32768)
    """Why, in a sentence for people, with the remedy where there is one."""
    last_transition_time: str = ""
    """When the status of this condition last changed."""
    observed_generation: int = 0
    """Generation of the job that it was made from."""


class DriverStatus(Settings):
    """Who runs the job."""

    operator: str
    """Identity of the operator's process."""
    lease: int
    """Number of its lease in the job's folder."""


class ResourceStatus(RLHFJobStatus):
    """How far a job is, as the operator publishes it."""

    observed_generation: int = 0
    """Generation of the job that this status was made from."""
    stages: str = ""
    """What the job is doing, as `kubectl get` shows it. Stages that are under way at once are all there, each with its
    step, such as `generation 13 · learning 12`."""
    progress: str = ""
    """Finished steps and steps of the whole job, such as `41/200`."""
    budget: str = ""
    """Part of `spec.budget` that is spent, such as `42%`."""
    reason: str = ""
    """Reason of the condition that matters most now."""
    restarts: int = 0
    """Restarts in a row after internal failures, without a finished step in between."""
    start_time: str | None = None
    """When the job was first run."""
    completion_time: str | None = None
    """When the job succeeded or failed."""
    driver: DriverStatus | None = None
    """Who runs the job, or ran it last."""
    conditions: list[Condition] = Field(
        default=[],
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """What is or is not so with the job, one of each type."""

    @property
    def settled(self) -> bool:
        """Whether nothing more happens to this generation of the job."""
        return self.phase in ("Succeeded", "Failed")


def read_resource_status(content: Mapping[str, Any] | None) -> ResourceStatus:
    """The status of a resource as far as this release knows its fields; an empty one where it can't be read.

    Nothing is lost by that: how far the training is stands in the job's folder.
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
    """As the API server keeps it, which knows no nulls, and with numbers that people can read."""
    content: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    for name, digits in _DIGITS.items():
        if name in content:
            content[name] = round(content[name], digits)
    return content


def changes_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch from one status to another: what is gone is null, and a list is given whole."""
    changes: dict[str, Any] = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            if inner := changes_of(old, value):
                changes[name] = inner
        elif old != value:
            changes[name] = value
    return changes
