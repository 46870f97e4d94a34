"""`rlhfless report`: write a page about a run."""

import typer

from rlhfless_operator.commands.options import RunFolder


def report(run_folder: RunFolder) -> None:
    """Write report.html into a run's folder: one self-contained page."""
    from rlhfless_operator.report import write_report

    typer.echo(write_report(run_folder))
