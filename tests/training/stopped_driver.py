"""A driver that stops itself (SIGSTOP) right before one of its writes, and goes on when it is told to.

    python -m tests.training.stopped_driver FOLDER WHAT

It says that it runs on another machine, where nobody can see whether it still does.
"""

import asyncio
import signal
import sys
import threading
from collections.abc import Callable

from rlhfless_operator.errors import UserError
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.reading.validation import parse_content
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.progress import LiveProgress
from rlhfless_operator.training.data.prompts import Prompts
from rlhfless_operator.training.driver import drive
from rlhfless_operator.training.journal import lease as lease_module
from rlhfless_operator.training.journal.lease import Lease
from rlhfless_operator.training.run import AvailableGpus
from rlhfless_operator.training.stages import rollout
from rlhfless_operator.training.stages.unscorable import UnscorableError
from tests.clusters.emulated_functions import EmulatedPlatform, Emulation
from tests.jobs import small_job

STEPS = 3


def drive_emulated(folder: str) -> None:
    """Run a job on emulated functions."""
    job = parse_content(small_job(steps=STEPS, checkpoints={"everySteps": 1}, tracking={"tensorboard": True}), "job")
    gpus = AvailableGpus(ActorRange(1, 1))
    asyncio.run(
        drive(job, JobFolder(folder), lambda on_state: EmulatedPlatform(Emulation(), on_state), LiveProgress(), gpus)
    )


def stop_before(what: str) -> None:
    """Have this process stopped right before it writes or removes something under its lease.

    Args:
        what: part of the name of the function that writes, or of its first argument.
    """
    fenced, stopped = Lease.fenced, False
    # All threads stop. One that is within a write would keep the next driver out, which has a test of its own.
    one_at_a_time = threading.RLock()

    def stopping(lease: Lease, write: Callable[..., object], *arguments: object) -> object:
        nonlocal stopped
        with one_at_a_time:
            if not stopped and what in f"{getattr(write, '__qualname__', write)} {arguments[:1]}":
                stopped = True
                # Of this very thread: if another one took the signal, this one would go on for a moment.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            return fenced(lease, write, *arguments)

    Lease.fenced = stopping  # type: ignore[method-assign]


def find_fault_with(what: str) -> None:
    """Have this process come to a removal that only a fault in the job's data or rewards leads to.

    Args:
        what: see `stop_before`.
    """

    def too_few(prompts: Prompts) -> None:
        raise ValueError("too few prompts")

    def unscored(*arguments: object) -> None:
        if f"step {STEPS}" in arguments:
            raise UnscorableError("too few rewards")

    if what == "_forget_data":
        Prompts.open_training = too_few  # type: ignore[method-assign]
    elif what.startswith("batches/"):
        rollout.check_unscorable = unscored  # type: ignore[assignment]


if __name__ == "__main__":
    lease_module._this.boot = "another machine"
    find_fault_with(sys.argv[2])
    stop_before(sys.argv[2])
    try:
        drive_emulated(sys.argv[1])
    except UserError as error:
        print(f"{type(error).__name__}: {error}")
