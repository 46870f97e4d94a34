"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[Path, typer.Argument(help="The job document (YAML).")]
RunFolder = Annotated[str, typer.Argument(help="A run's folder, such as runs/quickstart, or its URI.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override a value of the document, such as spec.steps=5; repeatable."
    ),
]
