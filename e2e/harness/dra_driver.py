"""The DRA driver of the cluster's GPUs, which a test may kill."""

import subprocess
from collections.abc import Sequence


class DraDriver:
    """Killed and started by a command.

    Args:
        command: takes `kill` or `start` as its last argument.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def kill(self) -> None:
        """End it without a warning. What it has published stays for a while."""
        self._run("kill")

    def start(self) -> None:
        """Have it run, and wait until its devices are published."""
        self._run("start")

    def _run(self, what: str) -> None:
        result = subprocess.run([*self._command, what], capture_output=True, text=True)
        assert result.returncode == 0, f"{' '.join(self._command)} {what}: {result.stdout}{result.stderr}"
