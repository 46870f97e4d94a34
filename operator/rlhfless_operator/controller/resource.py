"""A job as the API server has it, and what is to be done about it now: pure functions of its document."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from rlhfless_functions import artifacts
from rlhfless_functions.settings.base import parse_duration
from rlhfless_operator.controller.conditions import Reason
from rlhfless_operator.controller.kueue import QUEUE_LABEL
from rlhfless_operator.job.paths import is_uri
from rlhfless_operator.job.prices import BudgetSpec
from rlhfless_operator.job.resource_status import ResourceStatus
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob, RLHFJobSpec
from rlhfless_operator.job.validation import InvalidJobError, parse_content

ADOPT = "rlhfless.io/adopt"
"""Annotation that lets a job go on from work that another resource, or `rlhfless run`, has begun in its folder."""

NO_RESTART_FIELDS = ("suspend", "backoffLimit", "ttlAfterFinished", "budget")
"""Parts of the spec that don't disturb a running driver when they change: it asks for the budget before each step, and
does not read the others."""

Action = Literal["drive", "suspend", "expire", "none"]


@dataclass(frozen=True)
class JobResource:
    """The parts of a custom resource that the controller looks at."""

    namespace: str
    name: str
    uid: str
    generation: int
    version: str
    """resourceVersion."""
    spec: Mapping[str, Any]
    queue: str | None
    """The queue of Kueue that it waits in, by its label."""
    adopt: bool
    """Whether it is annotated with `rlhfless.io/adopt: "true"`."""
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
        """Restarts in a row that it may take."""
        limit = self.spec.get("backoffLimit")
        default: int = RLHFJobSpec.model_fields["backoff_limit"].default
        return limit if isinstance(limit, int) else default

    @property
    def time_to_live(self) -> float | None:
        """Seconds from its end to its deletion; None for ever."""
        try:
            seconds = parse_duration(self.spec.get("ttlAfterFinished"))
        except ValueError:
            return None
        return seconds if isinstance(seconds, float) and math.isfinite(seconds) else None

    def budget(self, otherwise: BudgetSpec | None) -> BudgetSpec | None:
        """What the job may spend.

        Args:
            otherwise: the answer where the document's can't be read.
        """
        content = self.spec.get("budget")
        try:
            return None if content is None else BudgetSpec.model_validate(content, by_name=False)
        except ValidationError:
            return otherwise

    @property
    def driven_spec(self) -> dict[str, Any]:
        """What a driver has to be started anew for when it changes."""
        return {name: value for name, value in self.spec.items() if name not in NO_RESTART_FIELDS}

    def job(self) -> RLHFJob:
        """The job that it describes.

        Raises:
            InvalidJobError: with every fault of the document.
        """
        metadata = {"name": self.name, "namespace": self.namespace}
        content = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": dict(self.spec)}
        return parse_content(content, source=f"{self.namespace}/{self.name}")


def next_action(resource: JobResource, status: ResourceStatus) -> Action:
    """What is to be done about a job: drive it, let go of it, delete it once its time is over, or nothing."""
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
    """When a finished job is deleted; None for never."""
    if resource.time_to_live is None or status.completion_time is None:
        return None
    try:
        return datetime.fromisoformat(status.completion_time) + timedelta(seconds=resource.time_to_live)
    except (ValueError, OverflowError):
        return None


def resolved(job: RLHFJob, files: str) -> RLHFJob:
    """The job with its relative paths taken from `files`, a folder in the functions' pods."""
    return job.resolve_paths(Path(files))


def root_of(job: RLHFJob, base: str) -> str:
    """URI of the job's folder: the very layout of `rlhfless run`, with relative paths taken from `base`."""
    uri = job.spec.artifacts.uri
    absolute = is_uri(uri) or Path(uri).is_absolute()
    return artifacts.join(uri if absolute else artifacts.join(base, uri), job.metadata.name)


def describe_faults(error: InvalidJobError) -> str:
    """All faults of a document, as `rlhfless validate` words them."""
    return "\n".join(str(fault) for fault in error.faults)
