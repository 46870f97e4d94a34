"""`rlhfless try-reward`: score responses without training."""

from pathlib import Path
from typing import Annotated

import typer

from rlhfless_operator.commands.options import JobFile, Settings
from rlhfless_operator.job.reading.validation import load_job


def try_reward(
    job_file: JobFile,
    responses: Annotated[
        Path | None,
        typer.Option(help='Responses to score: JSONL of {"response": …} with "row" or "prompt", or lines of text.'),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Without responses: number of prompts to answer.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Without responses: number of answers to each prompt.")] = 4,
    row: Annotated[
        int | None,
        typer.Option(min=0, help="Row of the prompt for responses that name none; by default one row after the other."),
    ] = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Use the evaluation's data and rewards.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    settings: Settings = None,
) -> None:
    """Score given responses, or responses that the model samples, without training.

    The exit status is 1 if a reward fails, or if no response has a reward.
    """
    from rlhfless_operator.console import print_tables
    from rlhfless_operator.local import try_reward as trials

    job = load_job(job_file, settings=settings or ()).resolve_paths(job_file.parent)
    trial = trials.make_trial(job, responses, prompts=prompts, samples=samples, row=row, evaluation=evaluation)
    result = trials.run_trial(trial)
    if as_json:
        typer.echo(result.model_dump_json())
    else:
        print_tables(trials.view(result))
    for fault in (found := trials.faults(result)):
        typer.echo(f"error: {fault}", err=True)
    raise typer.Exit(int(bool(found)))
