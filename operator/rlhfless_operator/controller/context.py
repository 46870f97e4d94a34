"""The context that all supervisors of an operator share."""

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
    """The platform of a job on a cluster."""

    async def open(self) -> None:
        """Create what the functions need. Called once, before anything else.

        Raises:
            PlatformUnavailableError: the cluster can't provide it now.
        """

    async def remove(self) -> None:
        """Remove what `open` created. Called after `close`, once the job has ended or is suspended.

        Raises:
            PlatformUnavailableError: the cluster does not answer now.
        """


Tell = Callable[[ConditionType, bool, Reason, str], None]
"""Sets a condition of a job: its type, status, reason, and a message with the remedy."""


class MakePlatform(Protocol):
    """Creates the platform of a job."""

    def __call__(
        self, resource: JobResource, job: RLHFJob, root: str, on_state: StateListener, tell: Tell
    ) -> ClusterPlatform:
        """Create a platform that is not open yet.

        Args:
            job: the job, with resolved paths.
            root: URI of the job's folder.
            on_state: called with every change of an instance.
            tell: sets conditions about the cluster.
        """


@dataclass(frozen=True)
class Pacing:
    """The controller's waiting times, in seconds."""

    tick: float = 5.0
    """Between two heartbeats."""
    lease: float = 5.0
    """Until the retry of a job that another driver holds."""
    first_restart: float = 10.0
    """Until the first restart after an internal failure; doubles with each consecutive one."""
    longest_restart: float = 360.0
    """Before any restart."""
    queue: float = 5.0
    """Between polls of the Workload of a job that waits in a Kueue queue or was admitted."""
    services: float = 10.0
    """Until the retry of a job whose Services can't be created."""
    closing: float = 25.0
    """For a driver to release everything; after it, the driver is abandoned."""
    farewell: float = 3.0
    """For the last write of the status when the operator stops."""


@dataclass(frozen=True)
class OperatorContext:
    """The context that all supervisors of an operator share."""

    api: JobsApi
    make_platform: MakePlatform
    metrics: OperatorMetrics
    identity: str
    """This operator's process."""
    files: str
    """Folder in the functions' pods that relative paths of a job are relative to."""
    artifacts: str
    """URI or folder that a relative `spec.artifacts.uri` is relative to."""
    queues: Queues
    """Kueue's queues, for jobs that wait in one."""
    settings: ClusterSettings
    """The operator's."""
    room: Room
    """Finds how many generation instances a job may use."""
    members: PoolMembers
    """Members of the pools, for plans that consider the GPUs that other jobs want."""
    pacing: Pacing = Pacing()
