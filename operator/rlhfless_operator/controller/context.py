"""The context that all supervisors of an operator share."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless_operator.controller.conditions import Tell
from rlhfless_operator.controller.pools import Pools
from rlhfless_operator.controller.prometheus import OperatorMetrics
from rlhfless_operator.controller.queueing import Queues
from rlhfless_operator.controller.resource import StoredJob
from rlhfless_operator.controller.room import Room
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import ResourceClient
from rlhfless_operator.platforms.base import StateListener
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.pool_member import PoolMember

_READ_AT_ONCE = 2


class MakePlatform(Protocol):
    """Creates the platform of a job."""

    def __call__(self, member: PoolMember, job: RLHFJob, root: str, on_state: StateListener, tell: Tell) -> JobPlatform:
        """Create a platform that is not open yet.

        Args:
            member: the job in its pool.
            job: the job, with resolved paths.
            root: URI of the job's folder.
            on_state: called with every change of an instance.
            tell: sets conditions about the cluster.
        """


@dataclass(frozen=True)
class Pacing:
    """Waiting times of the controller, in seconds."""

    tick: float = 5.0
    """Seconds between two heartbeats."""
    lease: float = 5.0
    """Seconds until the retry of a job that another driver holds."""
    first_restart: float = 10.0
    """Seconds until the first restart after an internal failure. They double with each consecutive one."""
    longest_restart: float = 360.0
    """Most seconds before any restart."""
    queue: float = 5.0
    """Seconds between polls of the Workload of a job that waits in a Kueue queue or was admitted."""
    services: float = 10.0
    """Seconds until the retry of a job whose Services can't be created."""
    closing: float = 25.0
    """Seconds for a driver to release everything. After them, the driver is abandoned."""
    farewell: float = 3.0
    """Seconds for the last write of the status when the operator stops."""


@dataclass(frozen=True)
class OperatorContext:
    """The context that all supervisors of an operator share."""

    jobs: ResourceClient[StoredJob]
    """Without patience: each supervisor retries its requests itself."""
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
    """Settings of the operator."""
    room: Room
    """Finds how many generation instances a job may use."""
    pools: Pools
    """The pools of GPUs, and the jobs in them."""
    pacing: Pacing = Pacing()
    reading: defaultdict[str, asyncio.Semaphore] = field(
        default_factory=lambda: defaultdict(lambda: asyncio.Semaphore(_READ_AT_ONCE))
    )
    """Limits the documents of each namespace that are read at a time."""
