"""An instance as its caller meets it: a real server on loopback around a function that does what the test says."""

import asyncio
import json
import sys
import threading
import time
from pathlib import Path

import aiohttp
import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    Preload,
    Started,
    WeightsReference,
    parse_event,
    parse_request,
)
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.settings import ModelSettings
from tests.serving.scripted import TOKEN, Scripted, request_for, serving


async def test_a_task_streams_started_progress_heartbeats_and_one_terminal_record(tmp_path: Path) -> None:
    function = Scripted()
    async with serving(function) as client:
        asyncio.get_running_loop().call_later(0.3, function.release.set)
        kinds = [event.event for event in await client.events(request_for(tmp_path))]
    assert (kinds[0], kinds[-1]) == ("started", "done")
    # On a busy machine the first heartbeat may come before the function has begun.
    assert sorted(set(kinds[1:-1])) == ["heartbeat", "progress"]
    assert kinds.count("progress") == 1


async def test_the_first_task_alone_reports_the_cold_start(tmp_path: Path) -> None:
    function = Scripted()
    function.release.set()
    async with serving(function) as client:
        first, second = [(await client.events(request_for(tmp_path, part=part)))[0] for part in ("a", "b")]
    assert first.instance == "pod-1"
    assert first.cold_start.load >= 0
    assert second.cold_start is None


async def test_the_cold_start_counts_from_when_the_instance_was_asked_for(tmp_path: Path) -> None:
    function = Scripted()
    function.release.set()
    instance = Instance("learning", function, name="pod-1", started_at=time.time() - 100)
    # With nothing to load an instance is ready before its server listens.
    await instance.start(None)
    instance.listening()
    started, *_ = [parse_event(line) async for line in instance.stream(parse_request(request_for(tmp_path)))]
    assert isinstance(started, Started)
    assert started.cold_start is not None
    assert started.cold_start.process >= 100


async def test_equal_keys_do_the_work_once(tmp_path: Path) -> None:
    function = Scripted()
    function.release.set()
    async with serving(function) as client:
        first = await client.events(request_for(tmp_path))
        second = await client.events(request_for(tmp_path))
    assert function.runs == 1
    assert first[-1].result == second[-1].result == {"uri": "d"}


async def test_closing_the_stream_cuts_the_task_and_frees_the_instance(tmp_path: Path) -> None:
    function = Scripted()
    async with serving(function) as client:
        async with client.run(request_for(tmp_path)) as response:
            await response.content.readline()
            assert json.loads((await client.status("/readyz"))[1])["busy"]
        await client.instance.idle()
        assert function.stopped_by == ["cut"]
        assert not artifacts.exists(str(tmp_path / "export.json")), "a cut task has no result"
        function.release.set()
        assert (await client.events(request_for(tmp_path)))[-1].event == "done"


async def test_draining_ends_the_task_with_a_terminal_record_and_takes_no_more(tmp_path: Path) -> None:
    function = Scripted()
    async with serving(function) as client:
        async with client.run(request_for(tmp_path)) as response:
            await response.content.readline()
            client.instance.drain()
            lines = [parse_event(line) async for line in response.content]
        assert lines[-1].event == "done"
        assert function.stopped_by == ["drain"]
        assert (await client.status("/readyz"))[0] == 503
        async with client.run(request_for(tmp_path)) as response:
            refusal = parse_event(await response.read())
        assert (response.status, refusal.reason, refusal.retryable) == (503, "drained", True)


@pytest.mark.parametrize("doing", ["nothing", "a task", "publishing what a cut left"])
async def test_sigterm_ends_the_process_at_once_but_for_what_it_has_to_publish(tmp_path: Path, doing: str) -> None:
    published, script = tmp_path / "published", Path(__file__).with_name("slow_instance.py")
    command = [sys.executable, str(script), TOKEN, str(published)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(await process.stdout.readline())}/v1/run"
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession() as session:
            if doing != "nothing":
                async with session.post(url, data=request_for(tmp_path), headers=headers) as response:
                    await response.content.readline()
                    if doing == "a task":
                        process.terminate()
                        lines = [parse_event(line) async for line in response.content]
                        assert lines[-1].event == "done", "the stream ends with its terminal record"
                    else:
                        response.close()
                # A cut is noticed within milliseconds, and takes a second to publish.
                await asyncio.sleep(0.2)
            if doing != "a task":
                process.terminate()
            await asyncio.wait_for(process.wait(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert published.exists() == (doing != "nothing")


async def test_one_task_at_a_time(tmp_path: Path) -> None:
    function = Scripted()
    async with serving(function) as client, client.run(request_for(tmp_path)) as response:
        await response.content.readline()
        async with client.run(request_for(tmp_path, part="other")) as second:
            refusal = parse_event(await second.read())
        assert (second.status, refusal.reason) == (409, "busy")


async def test_of_simultaneous_requests_one_is_taken(tmp_path: Path) -> None:
    function = Scripted()
    async with serving(function) as client:
        for number in range(5):
            bodies = [request_for(tmp_path, part=f"{number}-{other}") for other in range(4)]
            responses = await asyncio.gather(*map(client.run, bodies))
            assert sorted(response.status for response in responses) == [200, 409, 409, 409]
            for response in responses:
                response.close()
            await client.instance.idle()
    assert function.runs <= 5


async def test_a_task_whose_caller_is_gone_before_its_stream_begins_frees_the_instance(tmp_path: Path) -> None:
    function = Scripted()
    function.release.set()
    async with serving(function) as client:
        taken = client.instance.take()
        assert client.instance.busy
        client.instance.give_up(taken)
        assert not client.instance.busy
        async with client.run(request_for(tmp_path)) as response:
            await response.content.readline()
            client.instance.give_up(taken)
            assert client.instance.busy or function.runs


async def test_heartbeats_say_for_how_long_nothing_has_worked(tmp_path: Path) -> None:
    function = Scripted(stands=threading.Event())
    async with serving(function) as client, client.run(request_for(tmp_path)) as response:
        still = [0.0]
        while still[-1] < 0.5:
            event = parse_event(await response.content.readline())
            if event.event == "heartbeat":
                still.append(event.still_seconds)
        function.stands.set()
        while event.event != "done":
            event = parse_event(await response.content.readline())
            if event.event == "heartbeat" and event.still_seconds == 0.0:
                function.release.set()


@pytest.mark.parametrize(
    ("fault", "reason", "retryable"),
    [
        (TaskError("reward_failed", "reward 'x' raised"), "reward_failed", False),
        (TaskError("drained", "going", retryable=True), "drained", True),
        (artifacts.ArtifactMissingError("gone"), "artifact_missing", False),
        (artifacts.ArtifactUnwritableError("the disk is full"), "artifact_unwritable", False),
        (MemoryError("no room"), "out_of_memory", True),
        (KeyError("surprise"), "internal", True),
    ],
)
async def test_a_fault_becomes_a_failed_record(tmp_path: Path, fault: Exception, reason: str, retryable: bool) -> None:
    async with serving(Scripted(fault=fault)) as client:
        terminal = (await client.events(request_for(tmp_path)))[-1]
        assert (terminal.event, terminal.reason, terminal.retryable) == ("failed", reason, retryable)
        assert str(fault).strip("'") in terminal.message
        metrics = (await client.status("/metrics"))[1]
    assert f'rlhfless_tasks_total{{outcome="{reason}",task="export"}} 1.0' in metrics


async def test_an_instance_whose_engine_is_lost_says_so_and_ends(tmp_path: Path) -> None:
    function = Scripted(fault=TaskError("engine_lost", "the device fell off the bus", retryable=True))
    async with serving(function) as client:
        failed = (await client.events(request_for(tmp_path)))[-1]
        assert (failed.reason, failed.retryable) == ("engine_lost", True)
        await asyncio.wait_for(client.running, 60)


async def test_requests_that_are_not_this_jobs_are_refused(tmp_path: Path) -> None:
    function = Scripted()
    async with serving(function) as client:
        for body, token, status, words in [
            (request_for(tmp_path), "another token", 401, "bearer token"),
            (request_for(tmp_path), "", 401, "bearer token"),
            (b"{}", TOKEN, 422, "not a request"),
            (b"not json", TOKEN, 422, "not a request"),
            (request_for(tmp_path, protocol="2.0"), TOKEN, 400, "protocol version '2.0' is not supported"),
            (request_for(tmp_path, stage="generation"), TOKEN, 422, "this is a learning instance"),
            (request_for(tmp_path, model_card="x" * 20_000), TOKEN, 413, "longer than 10000 bytes"),
        ]:
            async with client.run(body, token) as response:
                refusal = parse_event(await response.read())
            assert (response.status, refusal.event) == (status, "failed")
            assert words in refusal.message
    assert function.runs == 0


async def test_ready_only_when_the_model_is_loaded() -> None:
    function = Scripted()
    async with serving(function, start=False) as client:
        assert (await client.status("/healthz"))[0] == 200
        assert (await client.status("/readyz"))[0] == 503
        await client.instance.start(
            Preload(model=ModelSettings(source="m"), weights=WeightsReference(version=4, uri="w"))
        )
        assert (await client.status("/readyz"))[0] == 200
    assert [weights.version for weights in function.preloaded] == [4]


async def test_an_instance_whose_model_cannot_be_loaded_is_ready_without_it() -> None:
    async with serving(Scripted(unloadable=True), start=False) as client:
        await client.instance.start(
            Preload(model=ModelSettings(source="m"), weights=WeightsReference(version=4, uri="w"))
        )
        assert (await client.status("/readyz"))[0] == 200
