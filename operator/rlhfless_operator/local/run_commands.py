"""The commands about a run that exists: `rlhfless report
compare
replay
sample`.
"""

import asyncio
import subprocess
import sys
from typing import Annotated

import typer

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError

RunFolder = Annotated[str, typer.Argument(help="A run's folder, such as runs/quickstart, or its URI.")]


def report(run_folder: RunFolder) -> None:
    """Write report.html into a run's folder: one self-contained page."""
    from rlhfless_operator.report import write_report

    typer.echo(write_report(run_folder))


def compare(
    run_folders: Annotated[list[str], typer.Argument(help="Folders of two or more runs.")],
    html: Annotated[str | None, typer.Option(help="Also write a page here.")] = None,
) -> None:
    """Put runs side by side: results, and what differs in their documents."""
    from rlhfless_operator.report import compare as compare_runs
    from rlhfless_operator.report import write_comparison

    typer.echo(compare_runs(run_folders))
    if html is not None:
        typer.echo(write_comparison(run_folders, html))


def replay(
    run_folder: RunFolder,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of the learner; as many as the run's had if left out.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the replay's weights, in RUN_FOLDER/replay.")] = False,
) -> None:
    """Learn a run's steps again from what it kept, and compare the weights; exits with 1 if they differ."""
    from rlhfless_operator.local.replay import replay_locally, verdict

    found = asyncio.run(replay_locally(run_folder, threads, keep=keep))
    typer.echo(verdict(found))
    raise typer.Exit(int(bool(found.differing)))


def sample(
    run_folder: RunFolder,
    prompt: Annotated[str, typer.Argument(help="Text of the prompt.")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many responses.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
) -> None:
    """Let a run's trained model answer a prompt."""
    model = artifacts.join(run_folder, "model")
    if not artifacts.is_published(model):
        raise UserError(f"{run_folder} has no trained model yet: let the run finish first")
    # The control plane has no torch; the answer is made in a process of the functions.
    command = [sys.executable, "-m", "rlhfless_functions.serving.sample", model, prompt, str(count), str(temperature)]
    raise typer.Exit(subprocess.run([*command, str(max_tokens), str(seed)], check=False).returncode)
