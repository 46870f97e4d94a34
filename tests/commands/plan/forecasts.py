"""Calls of `rlhfless plan`."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rlhfless_operator import cli


def forecast(job: Path, *options: str) -> dict[str, Any]:
    made = CliRunner().invoke(cli.app, ["plan", str(job), *options, "--json"])
    assert made.exit_code == 0, (made.output, made.exception)
    result: dict[str, Any] = json.loads(made.stdout)
    return result


def refusal(job: Path, *options: str) -> str:
    made = CliRunner().invoke(cli.app, ["plan", str(job), *options])
    assert isinstance(made.exception, ValueError), made.output
    return str(made.exception)
