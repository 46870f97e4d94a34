"""A job's resource on the API server, and the next action for it: pure functions of its document."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from rlhfless_functions.settings.base import parse_duration
from rlhfless_operator.controller.conditions import Reason
from rlhfless_operator.controller.kueue import QUEUE_LABEL
from rlhfless_operator.job.generated.crd import GROUP, PLURAL, VERSION
from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.reading.elsewhere import read_content
from rlhfless_operator.job.reading.validation import InvalidJobError
from rlhfless_operator.job.resource_status import ResourceStatus
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob, RLHFJobSpec
from rlhfless_operator.knative import Kind, KubernetesObject

ADOPT = "rlhfless.io/adopt"
"""Annotation that lets a job adopt work that another resource, or `rlhfless run`, began in its folder."""

NO_RESTART_FIELDS = ("suspend", "backoffLimit", "ttlAfterFinished", "budget")
"""Fields of the spec that may change without restarting a driver: it reads the budget before each step, and does not
read the others."""


class StoredJob(KubernetesObject):
    """An RLHFJob as the API server answers with it."""

    status: dict[str, Any] = Field(default_factory=dict)


JOBS = Kind(GROUP, VERSION, PLURAL, StoredJob)

Action = Literal["drive", "suspend", "expire", "none"]


@dataclass(frozen=True)
class JobResource:
    """The parts of a custom resource that the controller reads."""

    namespace: str
    name: str
    uid: str
    generation: int
    version: str
    """The resourceVersion."""
    spec: Mapping[str, Any]
    queue: str | None
    """The Kueue queue that it waits in, from its label."""
    adopt: bool
    """Whether it has the annotation `rlhfless.io/adopt: "true"`."""
    deleted: bool
    """Whether it is being deleted."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "JobResource":
        """Read it from the API server's document, which may be a view that changes later."""
        metadata = body["metadata"]
        spec = body.get("spec")
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            version=metadata.get("resourceVersion", ""),
            spec=dict(spec) if isinstance(spec, Mapping) else {},
            queue=(metadata.get("labels") or {}).get(QUEUE_LABEL),
            adopt=(metadata.get("annotations") or {}).get(ADOPT) == "true",
            deleted=metadata.get("deletionTimestamp") is not None,
        )

    @property
    def suspended(self) -> bool:
        """Whether the user wants it suspended."""
        return self.spec.get("suspend") is True

    @property
    def backoff_limit(self) -> int:
        """Most consecutive restarts."""
        limit = self.spec.get("backoffLimit")
        default: int = RLHFJobSpec.model_fields["backoff_limit"].default
        return limit if isinstance(limit, int) else default

    @property
    def time_to_live(self) -> float | None:
        """Seconds from the job's end to its deletion; None for never."""
        try:
            seconds = parse_duration(self.spec.get("ttlAfterFinished"))
        except ValueError:
            return None
        return seconds if isinstance(seconds, float) and math.isfinite(seconds) else None

    def budget(self, otherwise: BudgetSpec | None) -> BudgetSpec | None:
        """Return the budget of the document; None if it has none.

        Args:
            otherwise: the result if the document's budget can't be read.
        """
        content = self.spec.get("budget")
        try:
            return None if content is None else BudgetSpec.model_validate(content, by_name=False)
        except ValidationError:
            return otherwise

    @property
    def driven_spec(self) -> dict[str, Any]:
        """The part of the spec whose change needs a new driver."""
        return {name: value for name, value in self.spec.items() if name not in NO_RESTART_FIELDS}

    def job(self) -> RLHFJob:
        """Return the job that the resource describes. Blocks while another process reads it.

        Raises:
            InvalidJobError: the document is invalid; it holds every fault.
        """
        metadata = {"name": self.name, "namespace": self.namespace}
        content = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": dict(self.spec)}
        return read_content(content, source=f"{self.namespace}/{self.name}")


def next_action(resource: JobResource, status: ResourceStatus) -> Action:
    """Choose the next action for a job: drive it, release its instances, delete it when its time to live is over, or
    nothing."""
    if resource.deleted:
        return "none"
    if resource.suspended and status.phase not in ("Suspended", "Succeeded"):
        return "suspend"
    if resource.suspended or (status.settled and status.observed_generation == resource.generation):
        if status.phase == "Failed" and status.reason == Reason.FOLDER_TAKEN and resource.adopt:
            return "drive"
        return "expire" if status.settled and resource.time_to_live is not None else "none"
    if status.reason == Reason.BUDGET_EXHAUSTED and status.phase == "Suspended":
        return "none" if status.observed_generation == resource.generation else "drive"
    return "drive"


def expiry(resource: JobResource, status: ResourceStatus) -> datetime | None:
    """Return the time when a finished job is deleted; None for never."""
    if resource.time_to_live is None or status.completion_time is None:
        return None
    try:
        return datetime.fromisoformat(status.completion_time) + timedelta(seconds=resource.time_to_live)
    except (ValueError, OverflowError):
        return None


def resolved(job: RLHFJob, files: str) -> RLHFJob:
    """Return a copy whose relative paths are resolved against `files`, a folder in the functions' pods."""
    return job.resolve_paths(Path(files))


def describe_faults(error: InvalidJobError) -> str:
    """Return all faults of a document, in the words of `rlhfless validate`."""
    return "\n".join(str(fault) for fault in error.faults)
