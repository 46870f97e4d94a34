"""What all supervisors of an operator share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rlhfless_operator.controller.conditions import Reason
from rlhfless_operator.controller.contention import PoolMembers
from rlhfless_operator.controller.jobs_api import JobsApi
from rlhfless_operator.controller.metrics import OperatorMetrics
from rlhfless_operator.controller.queueing import Queues
from rlhfless_operator.controller.resource import JobResource
from rlhfless_operator.controller.room import Room
from rlhfless_operator.job.resource_status import ConditionType
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.base import Platform, StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings


class ClusterPlatform(Platform, Protocol):
    """Where the functions of a job on a cluster run."""

    async def open(self) -> None:
        """Make what the functions need. Called once, before anything else.

        Raises:
            PlatformUnavailableError: the cluster can't give it now.
        """

    async def remove(self) -> None:
        """Remove what `open` made. Called after `close`, once the job has ended or is suspended.

        Raises:
            PlatformUnavailableError: the cluster can't be asked now.
        """


Tell = Callable[[ConditionType, bool, Reason, str], None]
"""Sets a condition of a job: whether it is so, why, and the same in a sentence with the remedy."""


class MakePlatform(Protocol):
    """Says where the functions of a job run."""

    def __call__(
        self, resource: JobResource, job: RLHFJob, root: str, on_state: StateListener, tell: Tell
    ) -> ClusterPlatform:
        """A platform that is not open yet.

        Args:
            job: with resolved paths.
            root: URI of the job's folder.
            on_state: told of every change of an instance.
            tell: what the job's user should know of the cluster.
        """


@dataclass(frozen=True)
class Pacing:
    """How long the controller waits for what, in seconds."""

    tick: float = 5.0
    """Between two heartbeats."""
    lease: float = 5.0
    """Before a job that another driver has is tried again."""
    first_restart: float = 10.0
    """Before the first restart after an internal failure; doubled with each in a row."""
    longest_restart: float = 360.0
    """Before any restart."""
    queue: float = 5.0
    """Between two looks at the Workload of a job that waits in a queue of Kueue, or was let in from it."""
    services: float = 10.0
    """Before a job whose Services can't be had is tried again."""
    closing: float = 25.0
    """For a driver to let go of everything; then it is abandoned."""
    farewell: float = 3.0
    """For the last status when the operator stops."""


@dataclass(frozen=True)
class OperatorContext:
    """What all supervisors of an operator share."""

    api: JobsApi
    make_platform: MakePlatform
    metrics: OperatorMetrics
    identity: str
    """This operator's process."""
    files: str
    """Folder in the functions' pods that relative paths of a job are taken from."""
    artifacts: str
    """What a relative `spec.artifacts.uri` is taken from."""
    queues: Queues
    """Of Kueue, for jobs that wait in one."""
    settings: ClusterSettings
    """The operator's."""
    room: Room
    """For jobs that don't say how many generation instances they may use."""
    members: PoolMembers
    """For plans that know how many GPUs other jobs want."""
    pacing: Pacing = Pacing()
