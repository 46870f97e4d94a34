"""Samples join a live actor behind real Knative, one by one and by the thousand. The test prints the times, or keeps
them in a file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from benchmarks.shared.machine import describe_machine
from harness.by_hand import LABELS, functions_by_hand
from harness.images import Images
from harness.kubectl import Kubectl, KubectlError
from harness.storage import Storage

DRIVE_LIVE = Path(__file__).parent / "harness" / "drive_live.py"
COMMAND = (
    "RLHFLESS_E2E_LIVE_STREAM_FILE=benchmarks/cluster/results/live_stream.json make e2e E2E=e2e/test_live_stream.py"
)
LOOK_SECONDS = 10.0
MOST_GROWTH = 1.1


def test_samples_join_a_live_actor(kubectl: Kubectl, storage: Storage, images: Images) -> None:
    with functions_by_hand(kubectl, images, ["generation", "preparation"]) as functions, memory(kubectl) as looks:
        functions.hold(functions.names[0])
        said = [json.loads(line) for line in functions.drive(DRIVE_LIVE).splitlines()]
    [paced, unheard, *many] = said
    result = {"one_by_one": paced, "unheard": unheard, "many": many, "memory_mb": looks}
    print(json.dumps(result))
    if file := os.environ.get("RLHFLESS_E2E_LIVE_STREAM_FILE"):
        head = {"command": COMMAND, **describe_machine(("torch", "transformers"))}
        Path(file).write_text(json.dumps({**head, **result}, indent=2) + "\n")
    assert paced["samples"] == 1001
    assert all(part["samples"] == 2001 for part in (unheard, *many))
    assert not any(part["doubled"] for part in said)
    # The first looks are at an instance that has not loaded everything.
    early, late = looks[len(looks) // 4 : len(looks) // 2], looks[3 * len(looks) // 4 :]
    assert max(late) <= MOST_GROWTH * max(early), looks


@contextmanager
def memory(kubectl: Kubectl) -> Iterator[list[int]]:
    """The memory of the function's process in the generation pod, in MB, at every look."""
    looks: list[int] = []
    ended = Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            try:
                [pod] = kubectl.list("pods", **LABELS, **{"rlhfless.io__stage": "generation"})
                name = pod["metadata"]["name"]
                status = kubectl("exec", name, "--container=function", "--", "cat", "/proc/1/status")
            except (KubectlError, ValueError):
                # It starts or goes.
                continue
            looks.extend(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    looking = Thread(target=look)
    looking.start()
    try:
        yield looks
    finally:
        ended.set()
        looking.join()
