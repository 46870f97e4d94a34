"""The layers of a job's platform that an event of a task passes: `pytest -s tests/controller/test_frames.py`."""

import sys
from pathlib import Path

from rlhfless_functions.api import RunRequest
from rlhfless_operator.platforms.cluster_settings import PoolSettings
from tests.clusters.emulated_functions import Emulation
from tests.controller.api_server_jobs import jobs as jobs  # The fixtures.
from tests.controller.api_server_jobs import server as server
from tests.controller.operator_harness import Jobs, running_operator
from tests.jobs import small_job

POOLS = {"default": PoolSettings(gpus=4)}
GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}


def test_an_event_passes_two_frames(jobs: Jobs, tmp_path: Path) -> None:
    """The platform's own, and that of the wrapper with all hooks: here of a pool of whole GPUs, with metrics."""
    seen: set[tuple[str, ...]] = set()

    def note(request: RunRequest) -> None:
        frames, frame = [], sys._getframe()
        while frame := frame.f_back:  # type: ignore[assignment]
            if frame.f_code.co_name == "run" and "request" in frame.f_code.co_varnames:
                frames.append(frame.f_code.co_qualname)
        seen.add(tuple(frames))

    with running_operator(tmp_path, Emulation(before=note), pools=POOLS):
        jobs.apply(small_job(pods=GPU, steps=1))
        jobs.wait_phase("job", "Succeeded")
    print(f"frames of an event: {seen}")
    assert seen == {("EmulatedPlatform.run", "JobPlatform.run")}
