"""Work with a job whose environment's server runs on this machine meanwhile."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.local.environment_server import EnvironmentServer, check_command

T = TypeVar("T")


def with_server(job: RLHFJob, work: Callable[[RLHFJob], T]) -> T:
    """Do some work with a job, whose document then has the address of its environment's server.

    Raises:
        EnvironmentServerError: the job runs the server, but not on this machine.
    """
    environment = job.spec.environment
    if environment is None or environment.server is None:
        return work(job)
    check_command(environment.server)
    folder = Path(tempfile.mkdtemp(prefix="rlhfless-"))
    server = EnvironmentServer(environment.server, folder / "environment.log")

    async def served() -> T:
        try:
            settings = {"environment": environment.at(await server.url())}
            addressed = job.model_copy(update={"spec": job.spec.model_copy(update=settings)})
            return await asyncio.to_thread(work, addressed)
        finally:
            await server.close()

    done = asyncio.run(served())
    # Errors name the log.
    shutil.rmtree(folder, ignore_errors=True)
    return done
