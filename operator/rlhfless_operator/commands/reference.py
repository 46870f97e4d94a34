"""`rlhfless reference`: print the reference of a job document."""

import typer


def reference() -> None:
    """Print the reference of every field of a job document, in Markdown."""
    from rlhfless_operator.job.generated.reference import reference_markdown

    typer.echo(reference_markdown(), nl=False)
