"""Processes that tests start warm are those that Python would start."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from tests.processes import children_with
from tests.warm_start.starting import PYTHON

pytestmark = pytest.mark.usefixtures("nothing_is_left_behind")

FORK_SERVER = ["-m", "rlhfless_functions.serving.fork_server", str(os.getpid())]


@contextmanager
def started(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fork server that is ready."""
    with subprocess.Popen([program, *FORK_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert json.loads(output_of(process).readline()) == {"event": "ready"}
        yield process
        process.kill()


def output_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


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
    with started(warm_python) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert output_of(process).read() == b""
        assert process.wait(60) == 0


def test_it_ends_with_whoever_asked_for_it(warm_python: str) -> None:
    with started(warm_python) as process:
        process.kill()
        assert output_of(process).read() == b"", "nobody holds the other end any more"
        assert process.wait(60) == -signal.SIGKILL


def test_the_server_has_no_thread_that_a_fork_would_lose(warm_python: str) -> None:
    with started(warm_python):
        (server,) = children_with("tests.warm_start.server")
        threads = [file.read_text().strip() for file in Path(f"/proc/{server.pid}/task").glob("*/comm")]
    # The allocator that comes with pyarrow looks after its own.
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) == 1
