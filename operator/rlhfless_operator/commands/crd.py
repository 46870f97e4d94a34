"""`rlhfless crd`: print the CustomResourceDefinition."""

import typer


def crd() -> None:
    """Print the CustomResourceDefinition of RLHFJob."""
    from rlhfless_operator.job.generated.crd import crd_yaml

    typer.echo(crd_yaml(), nl=False)
