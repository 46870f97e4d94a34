"""`rlhfless convert`: a job from a configuration of TRL, verl or OpenRLHF."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlhfless_operator.commands.exits import fail


def convert(
    configuration: Annotated[
        Path,
        typer.Argument(help="Configuration of TRL's GRPO, verl or OpenRLHF: YAML, a shell script, or a Python script."),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the job into this file.")] = None,
    peer: Annotated[
        Literal["trl", "verl", "openrlhf"] | None,
        typer.Option("--from", help="Framework of the configuration; detected by default."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that TRL runs with, which its batch size depends on, if it does not say."),
    ] = None,
) -> None:
    """Convert a configuration of TRL, verl or OpenRLHF to a job, and report each field."""
    from rlhfless_operator.convert import convert as converted
    from rlhfless_operator.convert import job_yaml, read_configuration, table

    conversion = converted(read_configuration(configuration, peer), configuration.name, processes)
    text = job_yaml(conversion)
    if output is None:
        typer.echo(text, nl=False)
    else:
        if output.exists():
            fail(f"{output} already exists; name another file")
        output.write_text(text, encoding="utf-8")
    typer.echo(table(conversion), err=True)
