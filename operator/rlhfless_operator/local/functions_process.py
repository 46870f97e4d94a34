"""The functions in a process of their own, because the control plane has no torch."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import BaseModel

from rlhfless_operator.errors import UserError


class FunctionsMissingError(UserError):
    """The packages of the function processes are not installed."""


def check_functions(package: str = "torch") -> None:
    """Make sure that the functions can run on this machine.

    Args:
        package: what they need most.

    Raises:
        FunctionsMissingError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise FunctionsMissingError(
            "the functions are not installed; in the clone of rlhfless, pip install '.[functions]'"
        )


def ask_functions(module: str, question: BaseModel, work: str, error: type[UserError]) -> bytes:
    """Ask a module of `rlhfless_functions.serving`, and return its answer as JSON.

    Args:
        module: reads the question from its standard input, and writes the answer into the given file.
        question: the question.
        work: name of the work, for messages.
        error: raised if it does not answer.

    Raises:
        FunctionsMissingError: torch and other packages are not installed.
    """
    check_functions()
    with tempfile.TemporaryDirectory(prefix="rlhfless-") as folder:
        answer = Path(folder) / "result.json"
        command = [sys.executable, "-m", f"rlhfless_functions.serving.{module}", str(answer)]
        text = question.model_dump_json().encode()
        status = subprocess.run(command, input=text, stdout=subprocess.DEVNULL, check=False).returncode
        if status != 0 or not answer.exists():
            raise error(f"the {work} process ended with status {status}; see its output above")
        return answer.read_bytes()
