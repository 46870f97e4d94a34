"""`rlhfless sample`: let a trained model answer."""

import subprocess
import sys
from typing import Annotated

import typer

from rlhfless_functions import artifacts
from rlhfless_functions.api import PROMPTING
from rlhfless_operator.errors import UserError


def sample(
    run_folder: Annotated[str, typer.Argument(help="A run's folder, such as runs/quickstart, or an exported model's.")],
    prompt: Annotated[str, typer.Argument(help="Text of the prompt.")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many responses.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
) -> None:
    """Let a run's trained model answer a prompt."""
    model = artifacts.join(run_folder, "model")
    if not artifacts.is_published(model):
        if not artifacts.exists(artifacts.join(run_folder, PROMPTING)):
            raise UserError(
                f"{run_folder} has no trained model yet: let the run finish first, or make a model of what it has with"
                f" `rlhfless export {run_folder} FOLDER` and name that folder here"
            )
        model = run_folder
    # The control plane has no torch; the answer is made in a process of the functions.
    command = [sys.executable, "-m", "rlhfless_functions.serving.sample", model, prompt, str(count), str(temperature)]
    raise typer.Exit(subprocess.run([*command, str(max_tokens), str(seed)], check=False).returncode)
