"""One task over HTTP as the driver hears it, from a server that misbehaves in the ways that servers and proxies do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest
from aiohttp import web

from rlhfless_functions.api import (
    Done,
    Event,
    Failed,
    Gang,
    GenerationRequest,
    Heartbeat,
    LearnRequest,
    Leave,
    Line,
    RunRequest,
    SampleTask,
    Started,
    TaskKey,
    WeightsReference,
    dump_line,
)
from rlhfless_functions.api import dump_event as line
from rlhfless_functions.settings import ModelSettings, SamplingSettings
from rlhfless_operator.platforms.base import InstanceLostError, InstanceSilentError, TaskFailedError
from rlhfless_operator.platforms.stream import Pace, open_session, run_task, with_rarer_progress
from tests.jobs import export_request
from tests.platforms.test_live_request import live_request

Script = Callable[[web.StreamResponse], Awaitable[None]]
STARTED = line(Started(instance="pod-1"))
DONE = line(Done(result={"uri": "d"}))


@contextlib.asynccontextmanager
async def answering(script: Script, status: int = 200) -> AsyncIterator[str]:
    async def run(request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == "Bearer token"
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        await script(response)
        return response

    async with serving(run) as url:
        yield url


@contextlib.asynccontextmanager
async def serving(run: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/run", run)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def events_of(
    url: str,
    stall_seconds: float = 30.0,
    start_seconds: float | None = None,
    host: str | None = None,
    request: RunRequest | None = None,
) -> list[Event]:
    request = request or export_request()
    async with open_session() as session:
        events = run_task(
            session, url, "token", request, stall_seconds=stall_seconds, start_seconds=start_seconds, host=host
        )
        async with aclosing(events):
            return [event async for event in events]


async def test_the_next_instance_gets_the_lines_that_one_which_refused_the_request_had_read() -> None:
    bodies: list[bytes] = []

    async def run(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        if len(bodies) == 1:
            busy = Failed(reason="busy", message="one task at a time", retryable=True)
            return web.Response(status=409, body=line(busy))
        return web.Response(body=STARTED + DONE)

    request = live_request()
    request.send(Leave(sink="s"))
    request.end()
    async with serving(run) as url:
        with pytest.raises(TaskFailedError, match="one task"):
            await events_of(url, request=request)
        assert len(await events_of(url, request=request)) == 2
    first, second = bodies
    assert first == second
    assert second.endswith(dump_line(Leave(sink="s")))


def writing(*chunks: bytes) -> Script:
    async def script(response: web.StreamResponse) -> None:
        for chunk in chunks:
            await response.write(chunk)

    return script


async def test_events_come_whole_however_the_bytes_are_cut() -> None:
    stream = STARTED + line(Heartbeat()) + DONE
    async with answering(writing(*(stream[i : i + 7] for i in range(0, len(stream), 7)))) as url:
        assert [event.event for event in await events_of(url)] == ["started", "heartbeat", "done"]


async def test_a_stream_that_ends_in_good_order_without_a_terminal_record_is_lost() -> None:
    async with answering(writing(STARTED)) as url:
        with pytest.raises(InstanceLostError, match="ended without a terminal record"):
            await events_of(url)


async def test_a_proxys_own_words_are_no_events() -> None:
    async with answering(writing(STARTED, b"activator request timeout\n")) as url:
        with pytest.raises(InstanceLostError, match="activator request timeout"):
            await events_of(url)


async def test_a_proxys_words_need_no_line_of_their_own() -> None:
    async with answering(writing(STARTED, b"activator request timeout")) as url:
        with pytest.raises(InstanceLostError, match="activator request timeout"):
            await events_of(url)


async def test_a_broken_connection_is_a_lost_instance() -> None:
    async def script(response: web.StreamResponse) -> None:
        await response.write(STARTED)
        transport = response._payload_writer.transport  # type: ignore[union-attr]
        transport.abort()

    async with answering(script) as url:
        with pytest.raises(InstanceLostError):
            await events_of(url)


async def test_silence_is_a_lost_instance() -> None:
    async def script(response: web.StreamResponse) -> None:
        await response.write(STARTED)
        await asyncio.sleep(60)

    async with answering(script) as url:
        with pytest.raises(InstanceSilentError, match=r"the instance was silent for 0\.1 s"):
            await events_of(url, stall_seconds=0.1)


async def test_an_instance_in_which_nothing_works_is_lost_however_often_it_says_so() -> None:
    async def script(response: web.StreamResponse) -> None:
        await response.write(STARTED)
        for seconds in (0.0, 50.0, 0.0, 119.0, 121.0):
            await response.write(line(Heartbeat(still_seconds=seconds)))
        await asyncio.sleep(60)

    async with answering(script) as url:
        with pytest.raises(InstanceSilentError, match="nothing has worked in the instance for 121 s"):
            await events_of(url, stall_seconds=120.0)


async def test_an_instance_of_a_gang_may_wait_for_another() -> None:
    async with answering(writing(STARTED, line(Heartbeat(still_seconds=121.0)), DONE)) as url:
        gang = Gang(size=2, number=0, meeting="m", within_seconds=60.0)
        request = LearnRequest.model_construct(**dict(export_request()), gang=gang)
        assert [event.event for event in await events_of(url, 120.0, request=request)] == [
            "started",
            "heartbeat",
            "done",
        ]


async def test_the_first_line_may_take_longer_than_the_others() -> None:
    async def script(response: web.StreamResponse) -> None:
        await asyncio.sleep(0.5)
        await response.write(STARTED)
        await asyncio.sleep(60)

    async with answering(script) as url:
        with pytest.raises(InstanceSilentError, match=r"the instance was silent for 0\.1 s"):
            await events_of(url, stall_seconds=0.1, start_seconds=60.0)


async def test_nothing_at_all_is_silence_too() -> None:
    async with asyncio.timeout(60):
        server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(InstanceSilentError, match=r"the instance was silent for 0\.2 s"):
                await events_of(url, start_seconds=0.2)


async def test_an_ingress_is_told_which_service_is_meant() -> None:
    hosts = []

    async def run(request: web.Request) -> web.Response:
        hosts.append(request.host)
        return web.Response(body=DONE)

    app = web.Application()
    app.router.add_post("/v1/run", run)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        await events_of(f"http://127.0.0.1:{runner.addresses[0][1]}", host="job-learning.team.svc.cluster.local")
    finally:
        await runner.cleanup()
    assert hosts == ["job-learning.team.svc.cluster.local"]


async def test_nobody_listening_is_a_lost_instance() -> None:
    async with answering(writing(DONE)) as url:
        pass
    with pytest.raises(InstanceLostError):
        await events_of(url)


@pytest.mark.parametrize("status", [200, 409, 503])
async def test_a_failed_record_is_the_functions_own_word(status: int) -> None:
    failed = Failed(reason="busy", message="one task at a time", retryable=True)
    async with answering(writing(line(failed)), status=status) as url:
        with pytest.raises(TaskFailedError, match="one task at a time") as caught:
            await events_of(url)
    assert caught.value.retryable


async def test_what_comes_after_the_terminal_record_is_not_heard() -> None:
    async with answering(writing(DONE, b"more\n")) as url:
        assert [event.event for event in await events_of(url)] == ["done"]


async def test_a_redirect_is_not_followed_with_the_jobs_token() -> None:
    asked: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        asked.append(request.headers.get("authorization", ""))
        return web.Response(body=DONE)

    async def run(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    app = web.Application()
    app.router.add_post("/v1/run", run)
    app.router.add_post("/elsewhere", elsewhere)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        with pytest.raises(InstanceLostError, match="HTTP 307"):
            await events_of(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()
    assert asked == []


async def test_an_instance_that_floods_its_driver_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def noted(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("asyncio.sleep", noted)
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    pace = Pace()
    for _ in range(2000):
        await pace.keep(100)
    assert not any(pauses), "an honest instance waits for nothing but its turn"
    await pace.keep(100)
    assert pauses[-1] == 1.0
    heavy = Pace()
    for _ in range(5):
        await heavy.keep(4 * 2**20)
    assert pauses[-1] == 1.0


def generation_request() -> GenerationRequest:
    return GenerationRequest(
        key=TaskKey(job_uid="u", step=1, stage="generation", part="0", attempt=1),
        result="r",
        model=ModelSettings(source="m"),
        weights=WeightsReference(version=0, uri="w"),
        prompts="p",
        samples=[SampleTask(prompt=0, index=0)],
        sampling=SamplingSettings(),
        seed=0,
        sink="s",
    )


def test_very_many_streams_report_their_progress_more_rarely_and_nothing_else() -> None:
    request = generation_request()
    assert all(with_rarer_progress(request, streams) == request for streams in (1, 16, 1000))
    rarer = with_rarer_progress(request, 16_000)
    assert rarer == request.model_copy(update={"progress_seconds": 16.0})
    assert with_rarer_progress(export_request(), 16_000) == export_request()


async def test_a_stream_counts_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    open_streams: list[int] = []

    def noted(request: RunRequest, streams: int) -> RunRequest:
        open_streams.append(streams)
        return request

    monkeypatch.setattr("rlhfless_operator.platforms.stream.with_rarer_progress", noted)
    async with answering(writing(STARTED)) as url, open_session() as session:
        both = [run_task(session, url, "token", export_request(), stall_seconds=30.0) for _ in range(2)]
        for stream in both:
            assert await anext(stream) == Started(instance="pod-1")
        with pytest.raises(InstanceLostError):
            await anext(both[0])
        await both[1].aclose()
        with pytest.raises(InstanceLostError):
            await events_of(url)
    assert open_streams == [1, 2, 1]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_line_that_can_not_be_made_ends_the_stream_with_its_error(begun: bool) -> None:
    """The instance hears nothing more, and would wait for lines as long as the driver waits for events."""

    async def run(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if begun:
            await response.prepare(request)
            await response.write(STARTED)
        with contextlib.suppress(Exception):
            await request.content.read()
        await asyncio.sleep(60)
        return response

    def change(line: Line) -> Line:
        raise KeyError("no such share")

    request = live_request()
    async with serving(run) as url:
        asking = asyncio.create_task(events_of(url, request=request.with_lines(change)))
        await asyncio.sleep(0.2)
        request.send(Leave(sink="0"))
        with pytest.raises(KeyError, match="no such share"):
            async with asyncio.timeout(10):
                await asking
