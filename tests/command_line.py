"""`rlhfless` as a process of its own."""

import subprocess
import sys
from pathlib import Path


def call(*arguments: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "rlhfless_operator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, input=answer)


def run_command(file: Path, *options: str) -> list[str]:
    """The command that runs a job on this machine, with a core to each process."""
    return [sys.executable, "-m", "rlhfless_operator", "run", str(file), "--threads", "1", *options]


def run_to_its_end(file: Path, seconds: float = 280) -> str:
    """Run a job that succeeds; what the command says."""
    ended = subprocess.run(
        run_command(file), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout
