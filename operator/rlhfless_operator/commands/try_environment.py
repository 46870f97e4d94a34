"""`rlhfless try-environment`: play episodes without training."""

from typing import Annotated

import typer

from rlhfless_operator.commands.options import JobFile, Settings
from rlhfless_operator.job.reading.validation import load_job


def try_environment(
    job_file: JobFile,
    prompts: Annotated[int, typer.Option(min=1, help="Number of the data's first prompts to play.")] = 1,
    samples: Annotated[int, typer.Option(min=1, help="Number of episodes of each prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of conversations.")] = False,
    settings: Settings = None,
) -> None:
    """Play episodes of a job's environment with the untrained model, and show them as conversations.

    The exit status is 1 if the environment or a reward fails.
    """
    from rlhfless_operator.local import try_environment as trials
    from rlhfless_operator.local.served_environment import with_server

    job = load_job(job_file, settings=settings or ()).resolve_paths(job_file.parent)
    result = with_server(
        job, lambda served: trials.run_trial(trials.make_trial(served, prompts=prompts, samples=samples))
    )
    typer.echo(result.model_dump_json() if as_json else trials.view(result))
    for fault in (found := trials.faults(result)):
        typer.echo(f"error: {fault}", err=True)
    raise typer.Exit(int(bool(found)))
