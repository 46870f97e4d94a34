"""Jobs that benchmarks run on this machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_job(file: Path, run_folder: Path) -> list[dict[str, Any]]:
    """Run a job to its end with one thread, and return the records of its steps.

    Raises:
        SystemExit: it failed, with its output.
    """
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(file), "--threads", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
