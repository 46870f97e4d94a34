"""Records: what a benchmark found, with the command and the machine."""

import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.machine import describe_machine


def described_run(packages: Iterable[str]) -> dict[str, Any]:
    """Return the command of this process, and the machine with the versions of these packages."""
    return {"command": shlex.join(["python", *sys.argv]), **describe_machine(packages)}


def write_record(record: Mapping[str, Any], file: Path | None) -> None:
    """Write a record as JSON, if there is a file for it. The one before is whole until the new one is."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_name(f".{file.name}.new")
        written.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        written.replace(file)
