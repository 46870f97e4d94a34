"""A learner on this machine without a job that runs, for the commands that only need one."""

import tempfile
from pathlib import Path

from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.gpu_assignment import assign_gpus
from rlhfless_operator.local.local_run import threads_of
from rlhfless_operator.platforms.local.gpus import visible_gpus
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.requests.builder import RequestBuilder


def lone_learner(job: RLHFJob, folder: JobFolder, threads: int, command: str) -> LocalPlatform:
    """Return a platform for one learner of a job; close it when it is done.

    Args:
        job: the job.
        folder: of the run.
        threads: CPU threads of the learner.
        command: name of the command, for the folder of its logs.
    """
    gpus = assign_gpus(job, RequestBuilder(job, folder, ""), visible_gpus())
    return LocalPlatform(
        keep_alive={"generation": 0.0, "preparation": 0.0, "learning": 0.0},
        threads=threads_of(ActorRange(1, 1), 1, threads),
        log_path=Path(tempfile.mkdtemp(prefix=f"rlhfless-{command}-")) / "instances.jsonl",
        on_state=lambda change: None,
        stall_seconds=job.spec.limits.stall,
        gpus=gpus.gpus,
        gpus_per_instance=gpus.per_instance,
    )
