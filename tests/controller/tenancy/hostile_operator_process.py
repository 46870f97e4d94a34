"""An operator in a process of its own, for hostile tenants. It counts for how long a callback held its event loop up.

python -m tests.controller.tenancy.hostile_operator_process ARTIFACTS FIGURES.json
"""

import asyncio
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rlhfless_functions.api import Failed, RunRequest
from rlhfless_operator.controller.logs import configure_logs
from rlhfless_operator.controller.main import Operator
from rlhfless_operator.controller.tenancy import ownership
from rlhfless_operator.platforms.base import TaskFailedError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from tests.clusters.emulated_functions import Emulation
from tests.controller.operator_harness import QUICK, emulated

HUNG, SHOUTING = "hung-", "shouting-"
"""Beginnings of the names of jobs whose store never answers, and whose functions fail with megabytes."""


class HoldUps:
    """Notes the longest processor time of one callback of the event loop's thread: load of the machine is not in it."""

    def __init__(self, file: Path) -> None:
        self._file, self._longest = file, 0.0
        run = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            run(handle)
            if (seconds := time.thread_time() - before) > self._longest:
                self._longest = seconds
                whose = getattr(handle._callback, "__self__", handle)
                self._file.write_text(json.dumps({"seconds": seconds, "callback": repr(whose)[:500]}))

        asyncio.events.Handle._run = timed  # type: ignore[method-assign]


def never_answer() -> None:
    """Let the folders of some jobs be in a store that never answers."""
    claim = ownership._owner

    def hanging(uri: str) -> Any:
        if f"/{HUNG}" in uri:
            threading.Event().wait()
        return claim(uri)

    ownership._owner = hanging


def shout(request: RunRequest) -> None:
    """Fail as a hostile instance does."""
    if f"/{SHOUTING}" in request.result:
        raise TaskFailedError(Failed(reason="internal", message="\x1b[2J" + "x" * 4_000_000, retryable=False))


def main(artifacts: str, figures: str) -> None:
    configure_logs("text")
    never_answer()
    HoldUps(Path(figures))
    settings = ClusterSettings(functions_image="none", artifacts=artifacts, metrics_port=0, liveness_port=0)
    emulation = Emulation(remember=False, before=shout)
    asyncio.run(Operator(settings, emulated(emulation), pacing=QUICK).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
