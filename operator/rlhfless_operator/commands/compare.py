"""`rlhfless compare`: put runs side by side."""

from typing import Annotated

import typer


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
