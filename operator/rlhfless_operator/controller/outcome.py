"""The effect of a driver's end on its job: a pure function of the exception that ended the driver."""

from dataclasses import dataclass
from typing import Literal

from rlhfless_functions import artifacts
from rlhfless_operator.controller.conditions import Reason
from rlhfless_operator.errors import StoreUnavailableError, UserError
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.platforms.pods.store_mounts import ForeignFoldersError
from rlhfless_operator.training.driver import DeadlineExceededError, JobChangedError
from rlhfless_operator.training.journal.budget import BudgetExhaustedError
from rlhfless_operator.training.journal.lease import LeaseHeldError, LeaseLostError
from rlhfless_operator.training.stages.mismatch import MismatchError
from rlhfless_operator.training.stages.unscorable import UnscorableError

Kind = Literal["failed", "suspended", "wait", "no_services", "restart"]


@dataclass(frozen=True)
class Outcome:
    """The next action for a job whose driver has ended.

    `failed`: the job has failed. `suspended`: release everything until the job's document changes. `wait`: another
    driver holds the job, or the store does not answer; retry later. `no_services`: the cluster can't provide what the
    job needs now; retry later. `restart`: an internal failure, which counts against the backoff limit.
    """

    kind: Kind
    reason: Reason
    message: str


def outcome_of(error: BaseException) -> Outcome:
    """Classify the exception that ended a driver."""
    match error:
        case LeaseHeldError():
            return Outcome("wait", Reason.WAITING_FOR_LEASE, str(error))
        case LeaseLostError():
            return Outcome("wait", Reason.SUPERSEDED, str(error))
        case StoreUnavailableError() | artifacts.ArtifactError(retryable=True):
            return Outcome("wait", Reason.STORE_UNAVAILABLE, str(error))
        case PlatformUnavailableError():
            return Outcome("no_services", Reason.SERVICES_FAILED, str(error))
        case JobChangedError():
            message = f"{error.fields} can't be changed once a step is done; undo the change, or create a new job"
            return Outcome("failed", Reason.SPEC_CHANGED, message)
        case DeadlineExceededError():
            return Outcome("failed", Reason.DEADLINE_EXCEEDED, str(error))
        case BudgetExhaustedError():
            return Outcome("suspended", Reason.BUDGET_EXHAUSTED, str(error))
        case MismatchError():
            return Outcome("failed", Reason.MISMATCH, str(error))
        case ForeignFoldersError():
            return Outcome("failed", Reason.INVALID_SPEC, str(error))
        case UnscorableError():
            return Outcome("failed", Reason.UNSCORABLE, str(error))
        case UserError() | ValueError():
            return Outcome("failed", Reason.TRAINING_FAILED, str(error))
        case _:
            return Outcome("restart", Reason.RESTARTING, f"{type(error).__name__}: {error}")


def pause_before_restart(restarts: int, first: float, longest: float) -> float:
    """Return the seconds before the `restarts`-th consecutive restart; they double each time."""
    return float(min(longest, first * 2 ** min(restarts - 1, 60)))
