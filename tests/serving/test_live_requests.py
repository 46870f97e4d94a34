"""Requests whose body stays open, on a real server: lines go in while events come out."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import uvicorn

from rlhfless_functions.api import AddSamples, GenerationRequest, Join, Line, LiveBatch, dump_line, parse_event
from rlhfless_functions.data.rollouts import read_rollouts
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.serving.server import InstanceServer, create_app
from tests.generation.shares import generator as generator  # The fixtures.
from tests.generation.shares import make_request as make_request
from tests.generation.shares import prompts as prompts
from tests.generation.shares import run, run_and_kill
from tests.generation.shares import undisturbed as undisturbed
from tests.generation.shares import whole as whole
from tests.generation.test_live_batch import GROUPS, LIVE, MakeRequest, Rollouts

TOKEN = "the-jobs-own-token"


class Stream:
    """An open request, and the events that it is answered with."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.events: list[Any] = []

    def send(self, line: Line | GenerationRequest | bytes) -> None:
        if isinstance(line, GenerationRequest):
            line = line.model_dump_json().encode() + b"\n"
        self._lines.put_nowait(line if isinstance(line, bytes) else dump_line(line))

    def end(self) -> None:
        self._lines.put_nowait(None)

    async def _body(self) -> AsyncIterator[bytes]:
        while (line := await self._lines.get()) is not None:
            yield line

    def post(self) -> Any:
        headers = {"authorization": f"Bearer {TOKEN}"}
        return self._session.post(f"{self._url}/v1/run", data=self._body(), headers=headers)

    async def until(self, response: aiohttp.ClientResponse, wanted: Callable[[Any], bool]) -> Any:
        """The first event that is as wanted."""
        async for line in response.content:
            self.events.append(parse_event(line))
            if wanted(self.events[-1]):
                return self.events[-1]
        raise AssertionError(f"the stream ended after {self.events}")

    def finished(self) -> Rollouts:
        found: Rollouts = {}
        for event in self.events:
            if event.event == "sample":
                keys = {(sample.prompt, sample.index) for sample in event.samples}
                found |= {key: each for key, each in read_rollouts([event.part]).items() if key in keys}
        return found


@asynccontextmanager
async def serving(generator: Generator) -> AsyncIterator[tuple[Instance, Stream]]:
    instance = Instance("generation", generator, name="pod-1", started_at=time.time())
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    app = create_app(instance, token=TOKEN)
    server = InstanceServer(
        uvicorn.Config(app, port=0, log_config=None, lifespan="off"), instance, listening.set_result
    )
    running = asyncio.create_task(server.serve())
    port = await listening
    await instance.start(None)
    try:
        async with aiohttp.ClientSession() as session:
            yield instance, Stream(session, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        await running


def live(request: GenerationRequest, **changes: Any) -> GenerationRequest:
    return request.model_copy(update={"live": LIVE, "progress_seconds": 0.001, **changes})


def is_done(event: Any) -> bool:
    return event.event in ("done", "failed") and event.of is None


def decodes(event: Any) -> bool:
    return event.event == "progress" and event.tokens > 0


async def test_lines_add_samples_to_a_request_that_is_being_answered(
    make_request: MakeRequest, generator: Generator, whole: Rollouts
) -> None:
    async with serving(generator) as (_, stream):
        request = live(make_request("live", samples=GROUPS[0]))
        stream.send(request)
        async with stream.post() as response:
            await stream.until(response, decodes)
            for group in GROUPS[1:]:
                stream.send(AddSamples(sink=request.sink, samples=group))
            stream.end()
            done = await stream.until(response, is_done)
    assert done.result["finished"] == len(whole)
    assert stream.finished() == whole


async def test_the_request_stays_open_until_its_body_ends(
    make_request: MakeRequest, generator: Generator, whole: Rollouts
) -> None:
    async with serving(generator) as (instance, stream):
        request = live(make_request("live", samples=GROUPS[0]))
        stream.send(request)
        async with stream.post() as response:
            await stream.until(response, lambda event: event.event == "sample")
            await asyncio.sleep(0.3)
            assert instance.busy, "the batch is empty, and the body is open"
            stream.send(AddSamples(sink=request.sink, samples=GROUPS[1]))
            stream.end()
            await stream.until(response, is_done)
    assert stream.finished() == {key: whole[key] for key in stream.finished()}
    assert len(stream.finished()) == len(GROUPS[0]) + len(GROUPS[1])


@pytest.mark.parametrize("way", ["the answer is closed", "a line is wrong"])
async def test_a_lost_stream_is_a_cut(
    make_request: MakeRequest, generator: Generator, whole: Rollouts, way: str
) -> None:
    other = make_request("other", step=4)
    request = make_request("live")
    async with serving(Generator()) as (instance, stream):
        stream.send(live(request))
        stream.send(Join(request=other))
        async with stream.post() as response:
            await stream.until(response, decodes)
            if way == "a line is wrong":
                stream.send(b'{"line": "dance"}\n')
                with pytest.raises((AssertionError, aiohttp.ClientError)):
                    await stream.until(response, is_done)
        await instance.idle()
    again = make_request("again", resume_from=[request.sink])
    assert run(again, generator).finished() == whole
    stored = run(make_request("second", step=4, resume_from=[other.sink]), generator)
    assert stored.finished() == run(make_request("alone", step=4), generator).finished()


async def test_a_drain_ends_a_live_request_with_its_terminal_record(
    make_request: MakeRequest, generator: Generator, whole: Rollouts
) -> None:
    request = make_request("live")
    async with serving(Generator()) as (instance, stream):
        stream.send(live(request))
        async with stream.post() as response:
            await stream.until(response, decodes)
            instance.drain()
            done = await stream.until(response, is_done)
    assert done.event == "done"
    assert run(make_request("again", resume_from=[request.sink]), generator).finished() == whole


def test_a_killed_instance_loses_at_most_what_it_has_not_published(
    make_request: MakeRequest, generator: Generator, whole: Rollouts
) -> None:
    request = make_request("killed", live=LiveBatch(sequences=6, prompt_tokens=50), flush_seconds=0.05)
    run_and_kill(request, events=4)
    assert run(make_request("again", resume_from=[request.sink]), generator).finished() == whole


async def test_a_request_in_many_lines_is_still_a_request(make_request: MakeRequest) -> None:
    request = make_request("plain", samples=GROUPS[0][:1])
    async with serving(Generator()) as (_, stream):
        stream.send(json.dumps(json.loads(request.model_dump_json()), indent=2).encode())
        stream.end()
        async with stream.post() as response:
            done = await stream.until(response, is_done)
    assert done.result["finished"] == 1
