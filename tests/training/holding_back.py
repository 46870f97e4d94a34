"""A local platform that holds one response back: its process is stopped until something else has happened."""

import os
import re
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from rlhfless_functions.api import Event, RunRequest, Samples, Started
from rlhfless_operator.platforms.local.platform import LocalPlatform


def hold_back(step: int, until: Callable[[], bool], then: Callable[[int], None]) -> list[int]:
    """Stop the process of a step's first actor when it takes its samples.

    Args:
        step: whose.
        until: asked from then on, in a thread of its own, whether it is time.
        then: told of the process once it is.

    Returns:
        The step of each sample, in the order in which they are finished.
    """
    finished: list[int] = []
    held: list[int] = []
    run = LocalPlatform.run

    def wait(pid: int) -> None:
        while not until():
            time.sleep(0.01)
        # On a busy machine the driver may have given it up, and another one has its samples.
        with suppress(ProcessLookupError):
            then(pid)

    async def slowed(platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
        async with aclosing(run(platform, request)) as events:
            async for event in events:
                key = request.key
                if key.stage == "generation" and isinstance(event, Samples):
                    # A live actor's request has the key of the rollout that opened it.
                    found = re.search(r"step-0*(\d+)", event.part)
                    assert found is not None
                    finished.extend([int(found[1])] * len(event.samples))
                if (key.step, key.part) == (step, "actor-0000") and isinstance(event, Started) and not held:
                    pid = platform._processes[event.instance].pid
                    assert pid is not None
                    held.append(pid)
                    os.kill(pid, signal.SIGSTOP)
                    threading.Thread(target=wait, args=(pid,), daemon=True).start()
                yield event

    LocalPlatform.run = slowed  # type: ignore[method-assign]
    return finished
