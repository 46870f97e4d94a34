"""`rlhfless export`: make a model's folder of a run that was stopped."""

import asyncio
from typing import Annotated

import typer

from rlhfless_operator.commands.options import RunFolder


def export(
    run_folder: RunFolder,
    destination: Annotated[str, typer.Argument(help="The new folder for the model, or its URI.")],
) -> None:
    """Export the newest weights of a run as a Hugging Face folder; it may have been stopped, or have died.

    A run that ends does this itself, into its folder model/.
    """
    from rlhfless_operator.local.export import export_locally

    status = asyncio.run(export_locally(run_folder, destination))
    typer.echo(f"step {status.step} of {status.steps}: model in {destination}")
