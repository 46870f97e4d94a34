"""One live actor by hand, from inside the cluster: `python - JOB-FILE ROOT SERVICE-TEMPLATE TOKEN < drive_live.py`.

It runs in the operator's image, in three parts. In the first, samples join one by one. In the second, many join while
nobody reads the answer. In the third, many more join as fast as they are decoded, in several requests, as the loop
makes them. Each part prints a line of JSON.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from rlhfless_functions.api import AddSamples, Done, LiveBatch, Progress, Samples, SampleTask
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.platforms.stream import open_session, run_task
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.actors.actor_attempt import ActorAttempt
from rlhfless_operator.training.requests.builder import RequestBuilder

_STALL_SECONDS = 120.0
_ONE_BY_ONE = 1000
_BETWEEN_SECONDS = 0.03
_LOOK_SECONDS = 0.002
_MANY, _IN_A_REQUEST = 24_000, 2_000
_SILENT_SECONDS = 20
_PLACES = 64
_TOKENS = 8


class Actor:
    """One live request, and the samples that join it.

    Args:
        number: of the request; no two have the same sink.
        prompts: number of prompts.
    """

    def __init__(self, requests: RequestBuilder, folder: JobFolder, job: Any, number: int, prompts: int) -> None:
        self._prompts, self._first = prompts, number * 1_000_000
        self._sink = f"{folder.rollouts(1, 'training')}/live-{number}"
        attempt = ActorAttempt("live", number, requests.initial, [self._sample(0)], self._sink, [], {})
        request = requests.generate(1, "training", None, None, lambda prompts: [], attempt)
        changes = {
            "live": LiveBatch(sequences=_PLACES, prompt_tokens=job.spec.sampling.max_prompt_tokens),
            "sampling": request.sampling.model_copy(update={"max_response_tokens": _TOKENS}),
            # A sample that joins as another one leaves changes no place, so its join is told with this.
            "progress_seconds": 0.005,
        }
        self.request = LiveRequest.of(request.model_copy(update=changes))
        self._sent = 1
        self._waiting: deque[tuple[int, float]] = deque()
        """Number and time of each sample that has not joined."""
        self.reads = asyncio.Event()
        """Whether the answer is read."""
        self.reads.set()
        self.finished: set[tuple[int, int]] = set()
        self.doubled = 0
        self.seconds: list[float] = []
        """From the sending of each sample until its instance said that it had joined."""

    def _sample(self, number: int) -> SampleTask:
        return SampleTask(prompt=number % self._prompts, index=self._first + number // self._prompts)

    def add(self) -> None:
        self.request.send(AddSamples(sink=self._sink, samples=[self._sample(self._sent)]))
        self._sent += 1
        self._waiting.append((self._sent, time.monotonic()))

    @property
    def unfinished(self) -> int:
        return self._sent - len(self.finished)

    async def follow(self, events: AsyncGenerator[Any, None]) -> None:
        async with aclosing(events):
            async for event in events:
                await self.reads.wait()
                self._take(event)
                if isinstance(event, Done) and event.of is None:
                    return
        raise AssertionError("the stream has no end")

    def _take(self, event: Any) -> None:
        if isinstance(event, Progress):
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= (event.received or 0):
                self.seconds.append(now - self._waiting.popleft()[1])
        elif isinstance(event, Samples):
            found = {(sample.prompt, sample.index) for sample in event.samples}
            self.doubled += len(found & self.finished)
            self.finished |= found


async def main(job_file: Path, root: str, services: str, token: str) -> None:
    """Let samples join one by one, then many."""
    job = load_job(job_file).resolve_paths(job_file.parent)
    folder = JobFolder(root)
    requests = RequestBuilder(job, folder, "a-job")
    async with open_session() as session:

        def events_of(request: Any) -> AsyncGenerator[Any, None]:
            url = services.format(stage=request.key.stage)
            return run_task(session, url, token, request, stall_seconds=_STALL_SECONDS)

        [prompts] = [
            event.result["prompts"]
            async for event in events_of(requests.materialize("training", 0))
            if isinstance(event, Done)
        ]

        async def open_actor(number: int) -> tuple[Actor, asyncio.Task[None]]:
            actor = Actor(requests, folder, job, number, prompts)
            following = asyncio.create_task(actor.follow(events_of(actor.request)))
            while not actor.finished and not following.done():
                await asyncio.sleep(_LOOK_SECONDS)
            return actor, following

        async def live(number: int, count: int, *, one_by_one: bool) -> Actor:
            actor, following = await open_actor(number)
            for _ in range(count):
                await asyncio.sleep(_BETWEEN_SECONDS if one_by_one else 0)
                while actor.unfinished >= 2 * _PLACES and not following.done():
                    await asyncio.sleep(_LOOK_SECONDS)
                actor.add()
            actor.request.end()
            await following
            return actor

        await live(0, _ONE_BY_ONE // 10, one_by_one=True)
        paced = await live(1, _ONE_BY_ONE, one_by_one=True)
        taken = sorted(paced.seconds)
        report(
            samples=len(paced.finished),
            doubled=paced.doubled,
            milliseconds={
                name: round(1000 * taken[int(share * (len(taken) - 1))], 1)
                for name, share in (("median", 0.5), ("p95", 0.95), ("most", 1.0))
            },
        )
        unheard, following = await open_actor(2)
        unheard.reads.clear()
        for _ in range(_IN_A_REQUEST):
            unheard.add()
        await asyncio.sleep(_SILENT_SECONDS)
        unheard.reads.set()
        unheard.request.end()
        await following
        report(samples=len(unheard.finished), doubled=unheard.doubled, silent_seconds=_SILENT_SECONDS)
        for number in range(3, 3 + _MANY // _IN_A_REQUEST):
            began = time.monotonic()
            many = await live(number, _IN_A_REQUEST, one_by_one=False)
            seconds = time.monotonic() - began
            report(samples=len(many.finished), doubled=many.doubled, a_second=round(_IN_A_REQUEST / seconds))


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
