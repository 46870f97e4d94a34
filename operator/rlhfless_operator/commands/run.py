"""`rlhfless run`: train on this machine."""

import asyncio
import os
import signal
from typing import Annotated

import typer

from rlhfless_functions import artifacts
from rlhfless_operator.commands.exits import fail
from rlhfless_operator.commands.options import JobFile, Settings
from rlhfless_operator.job.reading.validation import load_job


def run(
    job_file: JobFile,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the job's outputs and start over.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before deleting.")] = False,
    artifacts_uri: Annotated[str | None, typer.Option("--artifacts", help="Instead of spec.artifacts.uri.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads for all instances; all cores by default.")
    ] = None,
    settings: Settings = None,
) -> None:
    """Train on this machine. Running it again resumes an interrupted job.

    The exit status is 3 if the next step would exceed spec.budget.
    """
    from rlhfless_operator.local.local_run import JobFinishedError, run_locally
    from rlhfless_operator.records.folder import JobFolder
    from rlhfless_operator.training.journal.budget import BudgetExhaustedError
    from rlhfless_operator.training.journal.run_folder import claim_folder

    job = load_job(job_file, packages=True, settings=settings or ()).resolve_paths(job_file.parent)
    root = artifacts.join(artifacts_uri or job.spec.artifacts.uri, job.metadata.name)
    if fresh and artifacts.list_files(root):
        claim_folder(job, JobFolder(root))
        if not yes:
            typer.confirm(f"Delete everything in {root} and start over?", abort=True)
        artifacts.remove(root)
    try:
        asyncio.run(run_locally(job, root, threads=threads or len(os.sched_getaffinity(0))))
    except JobFinishedError as error:
        typer.echo(str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("stopped; run the same command to resume", status=128 + signal.SIGINT)
    except BudgetExhaustedError as error:
        fail(f"suspended: {error}; run the same command to resume", status=3)
