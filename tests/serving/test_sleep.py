"""An instance that gives its memory back between two tasks."""

import asyncio
from pathlib import Path

from rlhfless_functions.api import parse_event
from tests.serving.scripted import Scripted, request_for, serving


async def test_a_sleep_is_answered_when_it_is_over_and_the_next_task_runs(tmp_path: Path) -> None:
    function = Scripted()
    function.release.set()
    function.sleep_ends.set()
    async with serving(function) as client:
        for _ in range(2):
            async with client.sleep() as response:
                assert response.status == 200
                assert (await response.json())["seconds"] >= 0
        told = [[event.event for event in await client.events(request_for(tmp_path, part=part))] for part in "ab"]
        assert [[kind for kind in kinds if kind != "heartbeat"] for kinds in told] == [
            ["started", "awake", "progress", "done"],
            ["started", "progress", "done"],
        ]
        metrics = (await client.status("/metrics"))[1]
    assert function.sleeps == 2
    assert "rlhfless_sleep_seconds_count 2.0" in metrics


async def test_while_a_sleep_is_under_way_everything_else_is_told_to_come_again(tmp_path: Path) -> None:
    function = Scripted()
    function.release.set()
    async with serving(function) as client:
        asleep = asyncio.ensure_future(client.sleep().__aenter__())
        while not function.sleeps:
            await asyncio.sleep(0.002)
        async with client.run(request_for(tmp_path)) as response:
            refusal = parse_event(await response.read())
        assert (response.status, refusal.reason, refusal.retryable) == (409, "busy", True)
        assert await client.refused_sleep() == (409, "busy", True)
        function.sleep_ends.set()
        assert (await asleep).status == 200
        assert (await client.events(request_for(tmp_path)))[-1].event == "done"
    assert function.sleeps == 1


async def test_what_is_at_work_going_away_or_another_jobs_does_not_sleep(tmp_path: Path) -> None:
    function = Scripted()
    async with serving(function) as client:
        assert await client.refused_sleep("another token") == (401, "bad_request", False)
        async with client.run(request_for(tmp_path)) as response:
            await response.content.readline()
            assert await client.refused_sleep() == (409, "busy", True)
        await client.instance.idle()
        client.instance.drain()
        assert await client.refused_sleep() == (503, "drained", True)
    assert function.sleeps == 0


async def test_an_instance_that_cannot_give_its_memory_back_says_so_and_ends(tmp_path: Path) -> None:
    function = Scripted(sleep_fault=RuntimeError("the device fell off the bus"))
    async with serving(function) as client:
        async with client.sleep() as response:
            failed = parse_event(await response.read())
        assert (response.status, failed.reason, failed.retryable) == (500, "engine_lost", True)
        assert "the device fell off the bus" in failed.message
        await asyncio.wait_for(client.running, 60)
    assert function.runs == 0
