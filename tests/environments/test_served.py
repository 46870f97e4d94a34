"""The user's environments on a server of rlhfless: what is different from an environment beside the engine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from rlhfless_functions.environments.served import ServedHost
from rlhfless_functions.environments.sessions import EnvironmentUnusableError
from rlhfless_functions.settings import EnvironmentSettings, ServedEnvironment
from tests.environments.chat import Play, settings_of
from tests.environments.openenv_server import Server
from tests.environments.served_host import ServerThread
from tests.processes import living

SUM = '''
class Env:
    def reset(self, **row):
        self.total = 0

    def add(self, amount: int) -> str:
        """Add.

        Args:
            amount: how much.
        """
        self.total += amount
        return f"at {self.total}"
'''


@pytest.fixture
def settings(tmp_path: Path) -> EnvironmentSettings:
    (tmp_path / "env.py").write_text(SUM)
    return settings_of(tmp_path / "env.py", served=ServedEnvironment())


@pytest.fixture(scope="module")
def thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A server for all who do it no harm."""
    file = tmp_path_factory.mktemp("thread") / "env.py"
    file.write_text(SUM)
    thread = ServerThread(settings_of(file, served=ServedEnvironment()))
    yield thread
    thread.close()


@contextmanager
def process(settings: EnvironmentSettings, port: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The server's own process, once it listens."""
    if not port:
        thread = ServerThread(settings)
        port = int(thread.url.rpartition(":")[2])
        thread.close()
    server = settings.server
    assert server is not None and server.command is not None
    environment = {**os.environ, "HOST": "127.0.0.1", "PORT": str(port)}
    started = subprocess.Popen([sys.executable, *server.command[1:]], env=environment)
    try:
        yield started, port
    finally:
        started.kill()
        started.wait()


@pytest.mark.parametrize("replayable", [True, False])
def test_a_server_that_is_killed_loses_no_sample(settings: EnvironmentSettings, replayable: bool) -> None:
    with process(settings) as (first, port):
        at = settings.at(f"http://127.0.0.1:{port}").model_copy(update={"replayable": replayable})
        play = Play(at, host=ServedHost(at))
        try:
            play.submit()
            assert "at 2" in play.text(play.call("add", '{"amount": 2}'))
            below = psutil.Process(first.pid).children(recursive=True)
            first.kill()
            with process(settings, port):
                seen = play.call("add", '{"amount": 1}')
                # As a process that is killed beside the engine.
                assert seen.restarted is not replayable
                assert "at 3" in play.text(seen) or not replayable
        finally:
            play.close()
    assert below
    psutil.wait_procs(below, timeout=60)
    assert not living(below), "all processes of the episodes end with their server"


def test_it_ends_when_it_is_told_to(settings: EnvironmentSettings) -> None:
    with process(settings) as (started, port):
        ServedHost(settings.at(f"http://127.0.0.1:{port}")).close()
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0


def test_an_episode_ends_with_its_connection(thread: ServerThread) -> None:
    host = ServedHost(thread.server.settings.at(thread.url))
    try:
        session = host.begin()
        session.ask({"do": "begin", "seed": 1, "row": {}}, 60.0, 0)
        other = host.begin()
        other.ask({"do": "begin", "seed": 1, "row": {}}, 60.0, 0)
        server_of = psutil.Process(thread.server.host()._process.pid)
        episodes = [each for each in server_of.children(recursive=True) if not each.children()]
        assert len(episodes) == 2
        session.close()
        gone, left = psutil.wait_procs(episodes, timeout=60, callback=lambda _: other.close())
        assert gone and not living(left)
    finally:
        host.close()


def test_files_that_can_not_be_used_are_told_by_the_server(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("raise RuntimeError('no display')")
    settings = settings_of(tmp_path / "env.py", served=ServedEnvironment())
    thread = ServerThread(settings)
    try:
        with pytest.raises(EnvironmentUnusableError, match="raised RuntimeError: no display"):
            ServedHost(settings.at(thread.url))
    finally:
        thread.close()


def test_a_server_of_openenv_is_refused_with_the_remedy(settings: EnvironmentSettings) -> None:
    told = r"answered what rlhfless's own server does not .*; environment.served.url is the address of `python"
    with Server() as server, pytest.raises(EnvironmentUnusableError, match=told):
        ServedHost(settings.at(server.url))


@pytest.mark.parametrize(
    "said",
    [
        "nonsense",
        "[]",
        '{"type": 3}',
        '{"type": "ask"}',
        '{"type": "ask", "data": {"request": {"do": "begin"}, "seconds": "x"}}',
        '{"type": "ask", "data": {"request": {"do": "call", "name": "add"}, "seconds": 9}}',
        '{"type": "ask", "data": {"request": 7, "seconds": 1}}',
    ],
)
async def test_a_stranger_that_talks_nonsense_disturbs_nobody(thread: ServerThread, said: str) -> None:
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{thread.url}/ws") as socket:
        await socket.send_str(said)
        answer = await socket.receive()
        if answer.type == aiohttp.WSMsgType.TEXT:
            assert json.loads(answer.data)["type"] == "error"
        async with http.ws_connect(f"{thread.url}/ws") as other:
            await other.send_str('{"type": "describe"}')
            told = await other.receive_json()
            assert told["data"]["schemas"][0]["function"]["name"] == "add"
