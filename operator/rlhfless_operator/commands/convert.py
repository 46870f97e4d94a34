"""`rlhfless convert`: a job from a configuration of TRL or verl."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlhfless_operator.commands.exits import fail


def convert(
    configuration: Annotated[Path, typer.Argument(help="TRL's GRPO or verl's configuration: YAML, or a script.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the job into this file.")] = None,
    peer: Annotated[
        Literal["trl", "verl"] | None,
        typer.Option("--from", help="Framework of the configuration; detected by default."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that TRL runs with, which its batch size depends on.")
    ] = 1,
) -> None:
    """Convert a configuration of TRL or verl to a job, and report each field that was converted or left out."""
    from rlhfless_operator.convert import convert_trl, convert_verl, job_yaml, read_configuration, table

    whose, given = read_configuration(configuration, peer)
    name = configuration.name
    conversion = convert_trl(given, name, processes) if whose == "trl" else convert_verl(given, name)
    text = job_yaml(conversion)
    if output is None:
        typer.echo(text, nl=False)
    else:
        if output.exists():
            fail(f"{output} already exists; name another file")
        output.write_text(text, encoding="utf-8")
    typer.echo(table(conversion), err=True)
