"""The lines of a request whose body stays open: each instance that is asked gets all, and none is kept for long."""

import asyncio
import gc
from collections.abc import AsyncGenerator

from rlhfless_functions.api import (
    GenerationRequest,
    Join,
    Leave,
    Line,
    LiveBatch,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.settings import EnvironmentSettings, ModelSettings, SamplingSettings
from rlhfless_operator.platforms.environments import addressed, needs_server
from rlhfless_operator.platforms.live_request import LiveRequest


def live_request() -> LiveRequest:
    return LiveRequest.of(
        GenerationRequest(
            key=TaskKey(job_uid="u", step=3, stage="generation", part="actor-0000", attempt=0),
            result="r",
            model=ModelSettings(source="m"),
            weights=WeightsReference(version=2, uri="w"),
            prompts="p",
            samples=[SampleTask(prompt=0, index=0)],
            sampling=SamplingSettings(),
            seed=0,
            sink="s",
            live=LiveBatch(sequences=1, prompt_tokens=1),
        )
    )


async def sinks(lines: AsyncGenerator[Line, None], count: int) -> list[str]:
    return [(await anext(lines)).sink for _ in range(count)]


async def test_every_reader_gets_all_lines() -> None:
    request = live_request()
    request.send(Leave(sink="0"))
    first = request.lines()
    assert await sinks(first, 1) == ["0"]
    waiting = asyncio.create_task(sinks(request.model_copy().lines(), 2))
    await asyncio.sleep(0)
    request.send(Leave(sink="1"))
    request.end()
    assert await waiting == ["0", "1"]
    assert [line.sink async for line in first] == ["1"]


async def test_lines_are_dropped_once_they_are_sent_to_the_instance_that_has_taken_the_request() -> None:
    request = live_request()
    refused, lines = request.lines(), request.lines()
    for number in range(3):
        request.send(Leave(sink=str(number)))
    await sinks(refused, 2)
    await sinks(lines, 1)
    request.is_taken()
    assert await sinks(refused, 1) == ["2"], "a body that goes on though it is refused drops nothing"
    for number in range(3, 1000):
        request.send(Leave(sink=str(number)))
        await sinks(lines, 1)
    assert await sinks(lines, 2) == ["998", "999"]
    gc.collect()
    assert sum(isinstance(each, Leave) for each in gc.get_objects()) < 10


async def test_lines_may_be_changed_on_their_way() -> None:
    request = live_request()
    changed = request.with_lines(lambda line: Leave(sink="other"))
    request.send(Leave(sink="0"))
    assert await sinks(changed.model_copy(update={"progress_seconds": 9.0}).lines(), 1) == ["other"]
    assert await sinks(request.lines(), 1) == ["0"]


async def test_shares_that_join_get_the_address_of_the_server_of_their_environments() -> None:
    environment = EnvironmentSettings.model_validate({"openenv": {"image": "maze:1"}})
    request = live_request().model_copy(update={"environment": environment})
    assert needs_server(request)
    sent = addressed(request, "http://maze")
    assert isinstance(sent, LiveRequest) and sent.environment is not None
    joins = request.model_copy(update={"sink": "next"})
    request.send(Leave(sink="0"))
    request.send(Join(request=GenerationRequest(**dict(joins))))
    lines = sent.lines()
    assert await anext(lines) == Leave(sink="0")
    line = await anext(lines)
    assert isinstance(line, Join) and line.request.environment == sent.environment == environment.at("http://maze")
