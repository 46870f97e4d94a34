"""The conditions of a job: their types and reasons, and pure functions that update them.

A new job has no conditions. `Accepted` comes first. `Complete` and `Failed` appear once they are true, `StepsTeach`
and `EngineAgrees` once they are false. The docstring of each reason says what the reader should do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlhfless_operator.formatting import excerpt
from rlhfless_operator.job.resource_status import Condition, ConditionType, ResourceStatus
from rlhfless_operator.records.status import Phase

_LONGEST_MESSAGE = 8000
"""Most characters of a message. An instance may fail with one that no resource has room for."""

ACCEPTED: ConditionType = "Accepted"
"""The document is a valid job."""
SERVICES_READY: ConditionType = "ServicesReady"
"""The functions' Services can take requests, or start pods for them."""
CLUSTER_READY: ConditionType = "ClusterReady"
"""The preflight found that the cluster's settings, quotas and permissions are enough for the job."""
PODS_HEALTHY: ConditionType = "PodsHealthy"
"""The functions' pods have no problems."""
PROGRESSING: ConditionType = "Progressing"
"""A driver is running the job's steps."""
STEPS_TEACH: ConditionType = "StepsTeach"
"""The steps contain something to learn from; false after three in a row without, while the job continues."""
ENGINE_AGREES: ConditionType = "EngineAgrees"
"""Engine and learner compute the same log-probabilities, up to rounding; false after a step in which they do not, while
the job continues."""
SUSPENDED: ConditionType = "Suspended"
"""`spec.suspend` or `spec.budget` has released everything; the work so far is kept."""
COMPLETE: ConditionType = "Complete"
"""All steps are done and the model is published."""
FAILED: ConditionType = "Failed"
"""The job has failed; the message says why and what to do."""


class Reason(StrEnum):
    """Every reason of a condition."""

    VALID = "Valid"
    """Accepted: the document is valid."""
    INVALID_SPEC = "InvalidSpec"
    """Accepted, Failed: the document is invalid; the message names each field with its remedy. Correct it and apply it
    again."""
    SPEC_CHANGED = "SpecChanged"
    """Accepted, Failed: a section changed that can't change once a step is done. Undo the change, or create a new
    job."""
    SERVICES_CREATED = "ServicesCreated"
    """ServicesReady: the functions' Services exist."""
    SERVICES_FAILED = "ServicesFailed"
    """ServicesReady: the Services can't be created now; the operator retries."""
    PREFLIGHT_PASSED = "PreflightPassed"
    """ClusterReady: the preflight found no problem."""
    PREFLIGHT_WARNED = "PreflightWarned"
    """ClusterReady: the job can run, but worse or not always; the message says how to fix it."""
    PREFLIGHT_FAILED = "PreflightFailed"
    """ClusterReady: a problem keeps the job from running; the message says how to fix it."""
    PODS_WORK = "PodsWork"
    """PodsHealthy: pods become ready."""
    PODS_FAIL = "PodsFail"
    """PodsHealthy: pods don't start, or crash; the message has Kubernetes' own reason and what to do."""
    TRAINING = "Training"
    """Progressing: a driver runs."""
    QUEUED = "Queued"
    """Progressing: Kueue has not admitted the job yet, or has evicted it; the message is Kueue's. The work so far is
    kept."""
    WAITING_FOR_TURN = "WaitingForTurn"
    """Progressing: other jobs use the pool's GPUs, which the message lists. The job continues when its turn comes. A
    higher `spec.priority` goes first."""
    WAITING_FOR_LEASE = "WaitingForLease"
    """Progressing: another driver, perhaps a killed one, holds the job; its lease expires soon."""
    SUPERSEDED = "Superseded"
    """Progressing: another driver has taken the job over while it ran."""
    STORE_UNAVAILABLE = "StoreUnavailable"
    """Progressing: the artifact store does not answer. The job resumes once it does."""
    RESTARTING = "Restarting"
    """Progressing: an internal failure ended the driver; another starts after a pause that doubles each time."""
    OPERATOR_STOPPED = "OperatorStopped"
    """Progressing: the operator was stopped; the next one resumes the job."""
    SOMETHING_TO_LEARN = "SomethingToLearn"
    """StepsTeach: the last step contained something to learn from again."""
    NOTHING_TO_LEARN = "NothingToLearn"
    """StepsTeach: several steps in a row contained nothing to learn from, because rewards were equal or no sample was
    in the loss. The message says which, and what to do."""
    ENGINE_AS_LEARNER = "EngineAsLearner"
    """EngineAgrees: in the last step, engine and learner computed the same again."""
    ENGINE_UNLIKE_LEARNER = "EngineUnlikeLearner"
    """EngineAgrees: engine and learner differ by more than the job's number formats explain. The message says by how
    much, and what to do."""
    SUSPENDED = "Suspended"
    """Suspended, Progressing: `spec.suspend` is true. Set it to false to continue."""
    BUDGET_EXHAUSTED = "BudgetExhausted"
    """Suspended, Progressing: the next step would exceed `spec.budget`. Raise it to continue."""
    NOT_SUSPENDED = "NotSuspended"
    """Suspended: `spec.suspend` is false, and the budget allows another step."""
    SUCCEEDED = "Succeeded"
    """Complete, Progressing: all steps are done."""
    FAILED = "Failed"
    """Progressing: the job has failed; see the condition Failed."""
    TRAINING_FAILED = "TrainingFailed"
    """Failed: a stage can't be completed; the message says why."""
    UNSCORABLE = "Unscorable"
    """Failed: the rewards scored too few samples; the message says how many. `spec.limits.unscorable` is the limit."""
    MISMATCH = "Mismatch"
    """Failed: engine and learner differ by more than `spec.limits.mismatch`. The message says by how much, and what to
    do."""
    FOLDER_TAKEN = "FolderTaken"
    """Failed: the job's folder holds the work of another resource, or of `rlhfless run`. Choose another name or folder,
    or adopt the work with the annotation `rlhfless.io/adopt: "true"`."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """Failed: `spec.activeDeadline` has passed. Raise it to continue."""
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    """Failed: more consecutive internal failures ended the driver than `spec.backoffLimit` allows. Suspend and resume
    the job to try again."""
    RUNNING = "Running"
    """Complete, Failed: the job was started again."""


Tell = Callable[[ConditionType, bool, Reason, str], None]
"""Sets a condition of a job: its type, status, reason, and a message with the remedy."""


@dataclass(frozen=True)
class Transition:
    """A change of a job's phase and conditions."""

    phase: Phase
    changes: tuple[tuple[ConditionType, bool, Reason], ...]
    """Conditions that it sets, the most important first."""
    message: str

    @property
    def reason(self) -> Reason:
        """The most important reason."""
        return self.changes[0][2]

    @property
    def good(self) -> bool:
        """Whether it is part of normal operation."""
        return self.phase != "Failed" and self.reason not in (
            Reason.RESTARTING,
            Reason.SERVICES_FAILED,
            Reason.STORE_UNAVAILABLE,
            Reason.BUDGET_EXHAUSTED,
        )


def started(message: str) -> Transition:
    """Return the transition when a driver holds the job."""
    return Transition(
        "Running",
        (
            (PROGRESSING, True, Reason.TRAINING),
            (ACCEPTED, True, Reason.VALID),
            (SUSPENDED, False, Reason.NOT_SUSPENDED),
        ),
        message,
    )


def waiting(phase: Phase, reason: Reason, message: str) -> Transition:
    """Return the transition of a job that should run, but can't yet."""
    return Transition(phase, ((PROGRESSING, False, reason), (ACCEPTED, True, Reason.VALID)), message)


def without_services(phase: Phase, message: str) -> Transition:
    """Return the transition of a job whose functions' Services can't be created now."""
    changes = (
        (SERVICES_READY, False, Reason.SERVICES_FAILED),
        (PROGRESSING, False, Reason.SERVICES_FAILED),
        (ACCEPTED, True, Reason.VALID),
    )
    return Transition(phase, changes, message)


def suspended() -> Transition:
    """Return the transition of a job that has released everything."""
    changes = ((SUSPENDED, True, Reason.SUSPENDED), (PROGRESSING, False, Reason.SUSPENDED))
    return Transition("Suspended", changes, "set spec.suspend to false to continue")


def out_of_budget(message: str) -> Transition:
    """Return the transition of a job that has released everything, because the budget does not allow another step."""
    changes = (
        (SUSPENDED, True, Reason.BUDGET_EXHAUSTED),
        (PROGRESSING, False, Reason.BUDGET_EXHAUSTED),
        (ACCEPTED, True, Reason.VALID),
    )
    return Transition("Suspended", changes, message)


def succeeded(message: str) -> Transition:
    """Return the transition of a job that has finished."""
    changes = (
        (COMPLETE, True, Reason.SUCCEEDED),
        (PROGRESSING, False, Reason.SUCCEEDED),
        (ACCEPTED, True, Reason.VALID),
    )
    return Transition("Succeeded", changes, message)


def failed(reason: Reason, message: str) -> Transition:
    """Return the transition of a job that has failed."""
    refused = reason in (Reason.INVALID_SPEC, Reason.SPEC_CHANGED)
    acceptance = (ACCEPTED, not refused, reason if refused else Reason.VALID)
    return Transition("Failed", ((FAILED, True, reason), (PROGRESSING, False, Reason.FAILED), acceptance), message)


def apply(status: ResourceStatus, transition: Transition, *, generation: int, now: str) -> ResourceStatus:
    """Return the status after a transition.

    Args:
        generation: generation of the resource that the transition is based on.
        now: RFC 3339.
    """
    conditions: Sequence[Condition] = status.conditions
    message = excerpt(transition.message, _LONGEST_MESSAGE)
    for kind, true, reason in transition.changes:
        conditions = set_condition(conditions, kind, true, reason, message, generation=generation, now=now)
    changed = {kind for kind, _, _ in transition.changes}
    for kind in (COMPLETE, FAILED):
        if kind not in changed and any(condition.type == kind for condition in conditions):
            conditions = set_condition(conditions, kind, False, Reason.RUNNING, "", generation=generation, now=now)
    settled = transition.phase in ("Succeeded", "Failed")
    return status.model_copy(
        update={
            "phase": transition.phase,
            "message": message,
            "reason": str(transition.reason),
            "conditions": list(conditions),
            "observed_generation": generation,
            "stage": status.stage if transition.phase == "Running" else None,
            "stages": status.stages if transition.phase == "Running" else "",
            "start_time": status.start_time or (now if transition.phase == "Running" else None),
            "completion_time": (status.completion_time if status.settled else None) or now if settled else None,
        }
    )


def set_condition(
    conditions: Sequence[Condition],
    kind: ConditionType,
    true: bool,
    reason: Reason,
    message: str,
    *,
    generation: int,
    now: str,
) -> list[Condition]:
    """Set one condition. Its transition time changes only if its status does."""
    before = next((condition for condition in conditions if condition.type == kind), None)
    status = "True" if true else "False"
    condition = Condition(
        type=kind,
        status="True" if true else "False",
        reason=str(reason),
        message=excerpt(message, _LONGEST_MESSAGE),
        last_transition_time=before.last_transition_time if before and before.status == status else now,
        observed_generation=generation,
    )
    if before is None:
        return [*conditions, condition]
    return [condition if other.type == kind else other for other in conditions]
