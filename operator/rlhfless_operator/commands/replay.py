"""`rlhfless replay`: learn a run's steps again."""

import asyncio
from typing import Annotated

import typer

from rlhfless_operator.commands.options import RunFolder


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
