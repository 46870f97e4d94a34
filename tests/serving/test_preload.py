"""What a fresh pod loads before it is ready."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlhfless_functions.api import Preload, WeightsReference
from rlhfless_functions.runtime.addresses import free_port
from rlhfless_functions.serving.preload import read_pointer, write_pointer
from rlhfless_functions.settings import ModelSettings
from tests.jobs import export_request


def pointer(folder: str) -> Preload:
    return Preload(model=ModelSettings(source=folder, dtype="float32"), weights=WeightsReference(version=0, uri=folder))


def test_a_pointer_is_read_as_it_was_written(tmp_path: Path) -> None:
    uri = str(tmp_path / "preload" / "generation.json")
    assert read_pointer(uri) is None
    write_pointer(uri, pointer("/models/small"))
    assert read_pointer(uri) == pointer("/models/small")
    write_pointer(uri, None)
    assert read_pointer(uri) is None


def test_what_is_no_pointer_loads_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pointer.json"
    file.write_text('{"model": 1}')
    assert read_pointer(str(file)) is None
    assert read_pointer(str(tmp_path)) is None
    assert read_pointer("no-such-protocol://x") is None


@asynccontextmanager
async def pod(uri: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A container's process, once it is ready."""
    port = free_port()
    environment = {
        **os.environ,
        "RLHFLESS_STAGE": "learning",
        "RLHFLESS_TOKEN": "t",
        "RLHFLESS_PRELOAD": uri,
        "PORT": str(port),
        "HOSTNAME": "pod-1",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlhfless_functions.serving.instance", env=environment
    )
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session, asyncio.timeout(240):
            while True:
                assert process.returncode is None
                try:
                    async with session.get("/readyz") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)
            yield session
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def events_of(session: aiohttp.ClientSession, source: str, folder: Path) -> list[dict[str, Any]]:
    outcome = {"result": str(folder / "result.json"), "destination": str(folder / "exported")}
    request = export_request(source=source, **outcome)
    headers = {"authorization": "Bearer t"}
    async with session.post("/v1/run", data=request.model_dump_json(), headers=headers) as answer:
        return [json.loads(line) async for line in answer.content]


@pytest.mark.slow
async def test_a_pod_whose_model_cannot_be_loaded_takes_requests_and_they_name_the_fault(tmp_path: Path) -> None:
    uri, missing = str(tmp_path / "pointer.json"), str(tmp_path / "missing")
    write_pointer(uri, pointer(missing))
    async with pod(uri) as session:
        events = await events_of(session, missing, tmp_path)
    assert events[0]["instance"] == "pod-1"
    assert events[-1]["event"] == "failed"
    assert missing in events[-1]["message"]
