"""The fork server: it has imported everything before the first fork, and started nothing that a fork would break."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


@pytest.mark.slow
def test_everything_is_imported_and_no_thread_started_before_the_first_fork() -> None:
    command = [sys.executable, "-m", "rlhfless_functions.serving.fork_server", str(os.getpid())]
    # OpenBLAS starts threads of its own, which numpy has used before any instance asks for some.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"event": "ready"}
        running = psutil.Process(process.pid)
        libraries = {mapped.path.rpartition("/")[2] for mapped in running.memory_maps()}
        threads = [file.read_text().strip() for file in Path(f"/proc/{process.pid}/task").glob("*/comm")]
        process.stdin.close()
        assert process.wait(60) == 0
    assert any(name.startswith("libtorch_cpu.") for name in libraries)
    assert any(name.startswith("tokenizers.") for name in libraries), "of transformers"
    # The allocator that comes with pyarrow starts a thread of its own, and looks after it when the process forks.
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) == 1
