"""One instance in a process of its own, and its times, for benchmarks that look into it."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.shared.records import described_run, write_record

TOKEN = "a-benchmarks-token"


@contextmanager
def running_instance(code: str, stage: str, threads: int, log: Path) -> Iterator[str]:
    """Run an instance while this is entered; its URL.

    Args:
        code: what its process runs; its arguments are the options as JSON, and `log`. It prints the port.
        stage: of the instance.
        threads: that it computes with.
        log: file for what the code measures.
    """
    from rlhfless_functions.serving.instance import InstanceOptions

    options = InstanceOptions.model_validate(
        {"stage": stage, "name": "one", "token": TOKEN, "threads": threads, "started_at": time.time()}
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, options.model_dump_json(), str(log)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


async def until_free(session: Any, url: str) -> None:
    """Wait until an instance has no request. Platforms send the next one only then."""
    while True:
        async with session.get(f"{url}/readyz") as answer:
            if not (await answer.json(content_type=None))["busy"]:
                return
        await asyncio.sleep(0.005)


def in_milliseconds(seconds: Sequence[float]) -> dict[str, float | list[float]]:
    """Times for a record, from seconds."""
    values = [1000 * each for each in seconds]
    return {
        "median_ms": round(statistics.median(values), 1),
        "max_ms": round(max(values), 1),
        "all_ms": [round(value, 1) for value in values],
    }


def tell(found: dict[str, Any], file: Path | None) -> None:
    """Print a record with the command and the machine, and write it to a file if there is one."""
    record = {**found, **described_run(["torch", "transformers"])}
    print(json.dumps(record, indent=1))
    write_record(record, file)
