"""Updates of a job's status: phases and conditions, the driver's fields, and an event for each transition."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.conditions import Reason, Transition
from rlhfless_operator.controller.context import OperatorContext
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.controller.status_writer import StatusWriter
from rlhfless_operator.job.resource_status import ConditionType, DriverStatus, ResourceStatus, read_resource_status
from rlhfless_operator.records import barren_steps, mismatch
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.records.status import RLHFJobStatus

_MIRRORED = [name for name in RLHFJobStatus.model_fields if name not in ("phase", "message")]
"""Fields that come from the driver's status. The phase does not: the end of a driver does not end the job."""

_WARNINGS = (
    (conditions.STEPS_TEACH, barren_steps.warning_now, Reason.NOTHING_TO_LEARN, Reason.SOMETHING_TO_LEARN),
    (conditions.ENGINE_AGREES, mismatch.warning_now, Reason.ENGINE_UNLIKE_LEARNER, Reason.ENGINE_AS_LEARNER),
)
"""Conditions that the last steps may make false: the warning, and the reasons for false and for true again."""
Post = Callable[[Transition], None]
"""Posts an event for a transition."""


class StatusUpdates:
    """The status of one job.

    Args:
        resource: the job.
        content: its status on the server.
    """

    def __init__(self, context: OperatorContext, resource: JobResource, content: Mapping[str, Any], post: Post) -> None:
        self._context = context
        self._post = post
        status = read_resource_status(content)
        self.writer = StatusWriter(context.jobs, resource, content, status, context.identity)
        """Writes the status to the server."""
        self._at_once = ""

    @property
    def status(self) -> ResourceStatus:
        """The job's newest status, even if it is not published yet."""
        return self.writer.status

    def begin(self, transition: Transition, resource: JobResource) -> None:
        """Apply a transition; the write to the server follows soon."""
        if transition.phase != "Running":
            self._at_once = ""
        before = self.status
        after = conditions.apply(before, transition, generation=resource.generation, now=_now())
        self.writer.update(after)
        self._context.metrics.show_phase(resource.namespace, resource.name, after.phase)
        if (before.phase, before.reason) != (after.phase, after.reason):
            self._post(transition)

    def mirror(self, status: RLHFJobStatus) -> None:
        """Copy a status that the driver has written into the job's folder."""
        changes = {name: getattr(status, name) for name in _MIRRORED}
        if status.step > self.status.step:
            changes["restarts"] = 0
        changes["stages"] = self._at_once or status.stage or ""
        changes["progress"] = f"{status.step}/{status.steps}" if status.steps else ""
        changes["budget"] = "" if status.budget_used is None else f"{status.budget_used:.0%}"
        self._update(**changes)

    def under_way(self, at_once: str) -> None:
        """Record which stages of several steps are under way. An empty value means none, or stages of one step."""
        if at_once != self._at_once:
            self._at_once = at_once
            self._update(stages=at_once or self.status.stage or "")

    def driven_by(self, lease: int) -> None:
        """Record that this operator drives the job."""
        self._update(driver=DriverStatus(operator=self._context.identity, lease=lease))

    def found_services(self, generation: int) -> None:
        """Record that the functions' Services exist."""
        self.tell(conditions.SERVICES_READY, True, Reason.SERVICES_CREATED, "", generation=generation)

    def tell(self, kind: ConditionType, true: bool, reason: Reason, message: str, *, generation: int) -> None:
        """Set a condition without changing the job's phase or posting an event."""
        found = conditions.set_condition(
            self.status.conditions, kind, true, reason, message, generation=generation, now=_now()
        )
        self._update(conditions=found)

    def learnt_from(self, records: Sequence[StepRecord], *, generation: int) -> None:
        """Set `StepsTeach` and `EngineAgrees` from the last finished steps. A condition is absent until it is false."""
        for kind, warning_now, bad, good in _WARNINGS:
            warning = warning_now(records)
            before = next((each for each in self.status.conditions if each.type == kind), None)
            if warning is not None:
                if before is None or before.message != warning:
                    self.tell(kind, False, bad, warning, generation=generation)
            elif before is not None and before.status == "False" and records:
                self.tell(kind, True, good, "", generation=generation)

    def observed(self, generation: int) -> None:
        """Record the generation that the job's driver uses."""
        if self.status.observed_generation != generation:
            self._update(observed_generation=generation)

    def restarting(self) -> int:
        """Count a restart. Returns the number of consecutive restarts."""
        self._update(restarts=self.status.restarts + 1)
        return self.status.restarts

    def _update(self, **changes: Any) -> None:
        self.writer.update(self.status.model_copy(update=changes))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
