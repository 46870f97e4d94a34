"""One training step by hand, from inside the cluster: `python - JOB-FILE ROOT SERVICE-TEMPLATE TOKEN < drive_step.py`.

Runs in the operator's image. Prints, for each task in turn, one line of JSON: task, instance, cold start, seconds to
the first event and to the end, result.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from rlhfless_functions.api import BatchReference, RunRequest, SampleTask, Started
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.stream import open_session, run_task
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.settings_history import SettingsHistory
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.requests.builder import RequestBuilder

_STALL_SECONDS = 120.0
_PROMPTS = 4
_SAMPLES = 8


async def main(job_file: Path, root: str, services: str, token: str) -> None:
    """Materialize, generate, prepare and learn, each through its service."""
    job = load_job(job_file).resolve_paths(job_file.parent)
    folder = JobFolder(root)
    requests = RequestBuilder(job, folder, "a-job")
    samples = [SampleTask(prompt=prompt, index=index) for prompt in range(_PROMPTS) for index in range(_SAMPLES)]

    async def ask(request: RunRequest) -> dict[str, Any]:
        url = services.format(stage=request.key.stage)
        asked, first = time.monotonic(), 0.0
        line: dict[str, Any] = {"task": request.task}
        async for event in run_task(session, url, token, request, stall_seconds=_STALL_SECONDS):
            first = first or time.monotonic() - asked
            if isinstance(event, Started):
                line |= event.model_dump(mode="json", include={"instance", "cold_start"})
        result: dict[str, Any] = event.result
        line |= {"first": first, "seconds": time.monotonic() - asked, "result": result}
        print(json.dumps(line), flush=True)
        return result

    async with open_session() as session:
        await ask(requests.materialize("training", 0))
        sink = f"{folder.rollouts(1, 'training')}/a-share"
        attempt = ActorAttempt("a-share", 0, requests.initial, samples, sink, [], {})
        request = requests.generate(1, "training", None, None, lambda prompts: [], attempt)
        share = await ask(request)
        visits = dict.fromkeys(range(_PROMPTS), 0)
        parts = share["parts"]
        chunk = await ask(requests.prepare(1, "training", requests.initial, None, "a-chunk", 0, samples, parts, visits))
        batch = BatchReference(step=1, parts=[chunk["part"]], samples=samples)
        status = RLHFJobStatus(uid="a-job")
        await ask(
            requests.learn(status, batch, [], SettingsHistory(), job.spec.steps or 1, checkpoint_due=True, attempt=0)
        )


asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
