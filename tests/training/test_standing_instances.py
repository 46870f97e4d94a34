"""An instance of any stage that is stopped or slow: the job comes to the same weights."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import STAGES, Event, RunRequest, Stage, Started
from rlhfless_operator.platforms.local.platform import LocalPlatform
from tests.training.whole_jobs import assert_same_final_weights, run_job

pytestmark = [pytest.mark.usefixtures("warm_start", "nothing_is_left_behind"), pytest.mark.nightly]

SHORT: dict[str, Any] = {
    "steps": 2,
    "batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4},
    "sampling": {"maxPromptTokens": 16, "maxResponseTokens": 8},
    "limits": {"stall": "10s"},
}


@pytest.fixture(scope="module")
def undisturbed(shared_tiny_job: Callable[..., Path]) -> Path:
    file = shared_tiny_job("undisturbed", **SHORT)
    run_job(file)
    return file


@contextlib.contextmanager
def at_first_task(stage: Stage, act: Callable[[int], None]) -> Iterator[list[int]]:
    """Do something with the process of a stage once it has begun its first task of a step; yields that process."""
    met: list[int] = []
    run = LocalPlatform.run

    async def watched(platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
        async with aclosing(run(platform, request)) as events:
            async for event in events:
                if request.key.stage == stage and request.key.step == 1 and isinstance(event, Started) and not met:
                    pid = platform._processes[event.instance].pid
                    assert pid is not None
                    met.append(pid)
                    act(pid)
                yield event

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPlatform, "run", watched)
        yield met


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_instance_is_replaced(tiny_job: Callable[..., Path], undisturbed: Path, stage: Stage) -> None:
    file = tiny_job("stopped", **SHORT)
    with at_first_task(stage, lambda pid: os.kill(pid, signal.SIGSTOP)) as stopped:
        run_job(file)
    assert stopped
    assert_same_final_weights(file, undisturbed)


@pytest.mark.parametrize("stage", STAGES)
def test_a_slow_instance_is_waited_for(tiny_job: Callable[..., Path], undisturbed: Path, stage: Stage) -> None:
    file = tiny_job("slow", **SHORT)
    with at_first_task(stage, slow_down) as slowed:
        run_job(file)
    assert slowed
    assert_same_final_weights(file, undisturbed)


def slow_down(pid: int, seconds: float = 15.0) -> None:
    """Let a process run for a hundredth of the time, for longer than it may be silent."""

    def pulse() -> None:
        with contextlib.suppress(ProcessLookupError):
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.99)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)

    threading.Thread(target=pulse, daemon=True).start()
