"""`rlhfless run` that kills itself before and after each write to its folder, once at each place.

    python -m tests.training.dying_at_writes JOB.yaml DEATHS.txt SHARE

It writes down where it has died, and dies in one of SHARE places. The next driver then gets one place further.
"""

import contextlib
import json
import os
import re
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import files
from rlhfless_operator.local.local_run import JobFinishedError
from tests.training.whole_jobs import folder_of, run_job


def _as_drivers_name(path: str) -> str:
    """Return a path that is the same for each driver."""
    return re.sub(r"^leases/\d+", "leases/N", path)


class Deaths:
    """Where processes have died.

    Args:
        file: has a line for each place.
        root: the job's folder.
        share: one of so many places counts.
    """

    def __init__(self, file: Path, root: Path, share: int) -> None:
        self._file, self._root, self._share = file, root, share
        file.touch()

    def at(self, place: str) -> None:
        """Die here, unless a process has."""
        if zlib.crc32(place.encode()) % self._share or place in self._file.read_text().splitlines():
            return
        with self._file.open("a") as lines:
            lines.write(f"{place}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def around(
        self, name: str, operation: Callable[..., Any], place: Callable[[str], str] = _as_drivers_name
    ) -> Callable[..., Any]:
        """Die before and after an operation on a file, whose `place` is the same for each process."""

        def dying(uri: str, *arguments: Any, **named: Any) -> Any:
            path = str(uri).removeprefix(f"{self._root}/")
            what = f"{name} {place(path)}{_content(path, arguments)}"
            self.at(f"before {what}")
            result = operation(uri, *arguments, **named)
            self.at(f"after {what}")
            return result

        return dying


def _content(path: str, arguments: tuple[Any, ...]) -> str:
    """Return what tells two writes of one file apart: the phase and the step of a status, the number of records."""
    if path == "metrics.jsonl":
        return f" {len(arguments[0].splitlines())}"
    try:
        status = json.loads(arguments[0])
        return f" {status['phase']} {status['stage']} {status['step']}"
    except (IndexError, KeyError, TypeError, ValueError):
        return ""


def die_at_writes(deaths: Deaths) -> None:
    """Have each write of this process interrupted."""
    for name in ("write_bytes", "create_exclusive", "remove"):
        dying = deaths.around(name, getattr(files, name))
        setattr(files, name, dying)
        setattr(artifacts, name, dying)
    artifacts.sweep = deaths.around("sweep", artifacts.sweep)


if __name__ == "__main__":
    job = Path(sys.argv[1])
    die_at_writes(Deaths(Path(sys.argv[2]), folder_of(job), int(sys.argv[3])))
    # The report comes after the job's end.
    with contextlib.suppress(JobFinishedError):
        run_job(job)
