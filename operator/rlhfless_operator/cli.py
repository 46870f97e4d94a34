"""The command line, `rlhfless`: its commands, and what an error prints."""

from importlib.metadata import version
from typing import Annotated

import typer

from rlhfless_functions import artifacts
from rlhfless_operator.commands.compare import compare
from rlhfless_operator.commands.convert import convert
from rlhfless_operator.commands.crd import crd
from rlhfless_operator.commands.exits import fail
from rlhfless_operator.commands.export import export
from rlhfless_operator.commands.operator import operator
from rlhfless_operator.commands.plan import plan
from rlhfless_operator.commands.preflight import preflight
from rlhfless_operator.commands.probe import probe
from rlhfless_operator.commands.reference import reference
from rlhfless_operator.commands.replay import replay
from rlhfless_operator.commands.report import report
from rlhfless_operator.commands.run import run
from rlhfless_operator.commands.sample import sample
from rlhfless_operator.commands.simulate import simulate
from rlhfless_operator.commands.try_environment import try_environment
from rlhfless_operator.commands.try_reward import try_reward
from rlhfless_operator.commands.validate import validate
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.reading.validation import InvalidJobError

app = typer.Typer(
    help="Serverless RLHF: train a language model by RL, with GPUs held only while they work.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlhfless {version('rlhfless')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options before a command."""


_COMMANDS = (
    run,
    validate,
    convert,
    try_reward,
    try_environment,
    report,
    compare,
    sample,
    export,
    replay,
    probe,
    plan,
    simulate,
    preflight,
    operator,
    crd,
    reference,
)
"""In the order of `rlhfless --help`."""

for _command in _COMMANDS:
    app.command()(_command)


def main() -> None:
    """Entry point. An error prints one line to standard error and exits with 1; an invalid job document exits with
    2."""
    try:
        app()
    except InvalidJobError as error:
        fail(str(error), status=2)
    except (artifacts.ArtifactError, UserError, ValueError) as error:
        fail(str(error))
