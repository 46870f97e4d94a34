"""Servers of environments as processes on this machine."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from rlhfless_functions.settings import OpenEnvEnvironment
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.platforms.local import environment_server
from rlhfless_operator.platforms.local.environment_server import EnvironmentServer, EnvironmentServerError
from tests.processes import living

SERVER = "tests.environments.openenv_server"
TELLS = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('{}', 'w'))"


@asynccontextmanager
async def server(
    log: Path, *command: str, on_state: Callable[[StateChange], None] = lambda change: None, **given: Any
) -> AsyncIterator[EnvironmentServer]:
    made = EnvironmentServer(OpenEnvEnvironment(command=[*command], **given), log, on_state)
    try:
        yield made
    finally:
        await made.close()


def processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    # The process that runs the command names it, too.
    return [each for each in living(children) if SERVER in (line := each.cmdline()) and "-c" not in line]


async def test_it_is_started_when_it_is_asked_for_and_ends_when_it_is_closed(tmp_path: Path) -> None:
    changes: list[StateChange] = []
    async with server(tmp_path / "log", "python", "-m", SERVER, sessions=3, on_state=changes.append) as made:
        assert processes() == []
        url, same = await asyncio.gather(made.url(), made.url())
        assert url == same and url.startswith("http://127.0.0.1:")
        async with aiohttp.ClientSession() as session, session.get(f"{url}/schema") as response:
            assert "action" in await response.json()
    assert processes() == []
    assert [change.state for change in changes] == ["starting", "busy", "ended"]
    assert {(change.instance, change.stage) for change in changes} == {("environment-1", "environment")}


async def test_one_that_is_killed_is_started_again_at_its_address(tmp_path: Path) -> None:
    changes: list[StateChange] = []
    async with server(tmp_path / "log", "python", "-m", SERVER, on_state=changes.append) as made:
        url = await made.url()
        (process,) = processes()
        process.kill()
        async with asyncio.timeout(60):
            while [change.state for change in changes[3:]] != ["starting", "busy"]:
                await asyncio.sleep(0.01)
        assert await made.url() == url
        async with aiohttp.ClientSession() as session, session.get(f"{url}/schema") as response:
            assert response.status == 200
    assert {change.instance for change in changes} == {"environment-1", "environment-2"}


async def test_one_that_ends_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, late = environment_server._answers, list[bool]()

    async def answered(port: int) -> bool:
        return bool(late and late.pop()) or await answers(port)

    monkeypatch.setattr(environment_server, "_answers", answered)
    changes: list[StateChange] = []
    async with server(tmp_path / "log", "python", "-m", SERVER, on_state=changes.append) as made:
        url = await made.url()
        (process,) = processes()
        late += [True] * 3
        process.kill()
        async with asyncio.timeout(60):
            while [change.state for change in changes[3:]] != ["starting", "busy"]:
                await asyncio.sleep(0.01)
        assert await made.url() == url and not late


async def test_it_knows_where_to_listen(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    program = TELLS.format(told)
    async with server(tmp_path / "log", "python", "-c", program, "--at=$(HOST):$(PORT)", "$(HOME)", sessions=7) as made:
        with pytest.raises(EnvironmentServerError):
            await made.url()
    arguments, environment = json.loads(told.read_text())
    assert arguments == [f"--at=127.0.0.1:{environment['PORT']}", "$(HOME)"]
    assert (environment["HOST"], environment["MAX_CONCURRENT_ENVS"]) == ("127.0.0.1", "7")
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["python", "-c", "print('no module maze'); raise SystemExit(3)"], "ends with status 3 before it listens"),
        (["there-is-no-such-program"], "ends with status 1 before it listens"),
        (["sleep", "600"], r"does not listen on 127.0.0.1:\d+ within 0.5 s"),
    ],
)
async def test_one_that_does_not_start_is_told_with_its_log(tmp_path: Path, command: list[str], problem: str) -> None:
    log = tmp_path / "logs" / "environment.log"
    seconds = 0.5 if command[0] == "sleep" else 60.0
    async with server(log, *command, start_seconds=seconds) as made:
        for _ in range(2):
            with pytest.raises(EnvironmentServerError, match=f"spec.environment {problem}; see {log}.*port"):
                await made.url()
    assert log.exists()
    assert "no module maze" in log.read_text() or "maze" not in " ".join(command)


def test_an_image_alone_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentServerError, match=r"runs on a cluster only; add openenv\.command"):
        EnvironmentServer(OpenEnvEnvironment(image="maze:1"), tmp_path / "log")


async def test_another_listener_at_its_address_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    monkeypatch.setattr(environment_server, "free_port", lambda: port)
    async with other, server(tmp_path / "log", "python", "-m", SERVER) as made:
        with pytest.raises(EnvironmentServerError, match=rf"can't listen on 127.0.0.1:{port}, where something else"):
            await made.url()


async def test_one_that_ends_while_another_listens_there_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("python", "-c", "raise SystemExit(3)")
    asked = []

    async def answers(port: int) -> bool:
        asked.append(port)
        # Other tests of this process may have left children of their own.
        while len(asked) > 1 and any(command[-1] in each.cmdline() for each in living(psutil.Process().children())):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        return len(asked) > 1

    monkeypatch.setattr(environment_server, "_answers", answers)
    async with server(tmp_path / "log", *command) as made:
        with pytest.raises(EnvironmentServerError, match="ends with status 3 before it listens"):
            await made.url()


def test_each_start_waits_longer_than_the_one_before() -> None:
    pauses = [environment_server._pause(starts) for starts in range(1, 8)]
    assert pauses == sorted(set(pauses)) and environment_server._pause(2000) == 30


@pytest.mark.parametrize("command", [["python", "-m", SERVER], ["sh", "-c", f"python -m {SERVER} & wait"]])
async def test_it_ends_with_a_driver_that_is_killed(tmp_path: Path, command: list[str]) -> None:
    program = (
        "import asyncio, pathlib;"
        "from rlhfless_functions.settings import OpenEnvEnvironment;"
        "from rlhfless_operator.platforms.local.environment_server import EnvironmentServer;"
        "made = lambda: EnvironmentServer(OpenEnvEnvironment(command={}), pathlib.Path('{}'));"
        "\nasync def main():\n    print(await made().url(), flush=True)\n    await asyncio.sleep(600)"
        "\nasyncio.run(main())"
    ).format(command, tmp_path / "log")
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert driver.stdout is not None
    assert (await driver.stdout.readline()).startswith(b"http://127.0.0.1:")
    (process,) = processes()
    os.kill(driver.pid, signal.SIGKILL)
    await driver.wait()
    async with asyncio.timeout(60):
        while living([process]):
            await asyncio.sleep(0.01)
