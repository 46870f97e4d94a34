"""Processes that tests start warm are those that Python would start."""

import json
import os
import subprocess
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.warm_start.starting import PYTHON

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

FORK_SERVER = ["-m", "rlhfless_functions.serving.fork_server", str(os.getpid())]


def started(program: str) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """A fork server that is ready: the process, its input and its output."""
    process = subprocess.Popen([program, *FORK_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"event": "ready"}
    return process, process.stdin, process.stdout


@pytest.mark.parametrize("arguments", [["validate", "job.yaml"], ["validate", "missing.yaml"], ["--help"], ["walk"]])
def test_it_has_the_callers_arguments_folder_environment_output_and_status(
    warm_python: str, tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "job.yaml").write_text("kind: RLHFJob\n")
    environment = {**os.environ, "COLUMNS": "70"}
    expected, given = (
        subprocess.run(
            [program, "-m", "rlhfless_operator", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        for program in (PYTHON, warm_python)
    )
    assert expected.stdout + expected.stderr
    assert (given.returncode, given.stdout, given.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_what_the_server_does_not_know_is_left_to_python(warm_python: str) -> None:
    command = [warm_python, "-c", "import sys; print(sys.executable); sys.exit(int(sys.argv[1]))", "3"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (3, f"{PYTHON}\n")


def test_it_ends_with_its_input_as_python_would(warm_python: str) -> None:
    process, given, told = started(warm_python)
    given.close()
    assert told.read() == b""
    assert process.wait(60) == 0
    told.close()


def test_it_ends_with_whoever_asked_for_it(warm_python: str) -> None:
    process, given, told = started(warm_python)
    process.kill()
    assert told.read() == b"", "nobody holds the other end any more"
    assert process.wait(60) == -9
    given.close()
    told.close()


def test_the_server_has_no_thread_that_a_fork_would_lose(warm_python: str) -> None:
    process, given, told = started(warm_python)
    (server,) = (each for each in psutil.Process().children() if "tests.warm_start.server" in each.cmdline())
    threads = [file.read_text().strip() for file in Path(f"/proc/{server.pid}/task").glob("*/comm")]
    # The allocator that comes with pyarrow looks after its own.
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) == 1
    given.close()
    process.wait(60)
    told.close()
