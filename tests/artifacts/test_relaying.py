"""Versions that go from instance to instance, in chains and lines.

Instances are processes with servers and copies of their own. Sources that fail are servers of the test.
"""

import hashlib
import http.server
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsFetched
from rlhfless_functions.artifacts import Line, Sources, peers, relaying
from rlhfless_functions.artifacts.copies import copy_place
from rlhfless_functions.artifacts.line import entry_name
from rlhfless_functions.artifacts.peers import copy_token
from tests.artifacts.folders import content, publish

TOKEN = "the-jobs-own-token"
FILES = {
    "config.json": b"{}",
    "empty": b"",
    "part/model.safetensors": random.Random(1).randbytes(3 * 2**20 + 7),
    "other.safetensors": random.Random(2).randbytes(5 * 2**20),
}
SIZE = sum(map(len, FILES.values()))
INSTANCE = f"""
import asyncio, os, sys
import uvicorn
from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import Line, Sources, line, peers
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.serving.server import InstanceServer, create_app

# Processes of a busy machine begin late.
peers.PATIENCE_SECONDS = peers.ANSWER_SECONDS = 120.0
line.SETTLING_SECONDS = 3.0

def listening(port):
    print(port, flush=True)

instance = Instance("generation", None, name="one", started_at=0.0, token={TOKEN!r})
app = create_app(instance, token={TOKEN!r})
config = uvicorn.Config(app, port=0, log_config=None, lifespan="off")

async def main():
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(InstanceServer(config, instance, listening).serve())
    while words := await loop.run_in_executor(None, sys.stdin.readline):
        uri, *addresses = words.split()
        sources = Sources(addresses, {TOKEN!r})
        if addresses[:1] == ["line"]:
            sources = Sources((), {TOKEN!r}, Line(addresses[1], instance.address))
        before = artifacts.fetched()
        folder = await loop.run_in_executor(None, lambda: artifacts.local_folder(uri, sources=sources))
        now = artifacts.fetched()
        print(folder, now.bytes - before.bytes, now.relayed_bytes - before.relayed_bytes,
              now.refused_sources - before.refused_sources, flush=True)
    os._exit(0)

asyncio.run(main())
"""


class Process:
    """A process with a function's server, and copies of its own."""

    def __init__(self, cache: Path) -> None:
        environment = {**os.environ, "RLHFLESS_CACHE": str(cache)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", INSTANCE], stdin=pipe, stdout=pipe, env=environment, text=True, bufsize=1
        )
        self.address = f"http://127.0.0.1:{self._line()}"

    def ask(self, uri: str, *addresses: str) -> None:
        """Let it fetch a version from the first of these that has it, or with "line" and a URI from those in a line."""
        assert self._process.stdin is not None
        print(uri, *addresses, file=self._process.stdin, flush=True)

    def answer(self) -> tuple[dict[str, bytes], WeightsFetched]:
        """The files that it has, and what it fetched for them."""
        folder, store, relayed, refused = self._line().split()
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
        }
        return files, WeightsFetched(bytes=int(store), relayed_bytes=int(relayed), refused_sources=int(refused))

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    """Starts processes by name."""
    processes: list[Process] = []

    def started(name: str) -> Process:
        processes.append(Process(tmp_path / name))
        return processes[-1]

    yield started
    for process in processes:
        process.end()


@pytest.fixture
def version(s3: str) -> str:
    """A published version in an object store."""
    publish(f"{s3}/weights/step-1", FILES)
    return f"{s3}/weights/step-1"


@pytest.fixture
def line(s3: str) -> str:
    """The line of that version."""
    return f"{s3}/lines/step-1"


@pytest.mark.slow
def test_a_chain_reads_the_store_once(version: str, start: Callable[[str], Process]) -> None:
    chain = [start(name) for name in ("a", "b", "c")]
    # All at once, the last one first: each waits for the one before it to begin.
    for number in (2, 1, 0):
        chain[number].ask(version, *[each.address for each in chain[:number]][::-1])
    told = [process.answer() for process in chain]
    assert all(files == FILES for files, _ in told)
    assert [fetched for _, fetched in told] == [
        WeightsFetched(bytes=SIZE),
        WeightsFetched(relayed_bytes=SIZE),
        WeightsFetched(relayed_bytes=SIZE),
    ]


@pytest.mark.slow
def test_an_instance_that_is_gone_is_passed_over(version: str, start: Callable[[str], Process]) -> None:
    head, gone, last = (start(name) for name in ("a", "b", "c"))
    head.ask(version)
    head.answer()
    gone.end()
    last.ask(version, gone.address, head.address)
    assert last.answer() == (FILES, WeightsFetched(relayed_bytes=SIZE, refused_sources=1))


def test_newcomers_read_the_store_once(version: str, line: str, start: Callable[[str], Process]) -> None:
    newcomers = [start(name) for name in ("a", "b", "c", "d")]
    for each in newcomers:
        each.ask(version, "line", line)
    told = [process.answer() for process in newcomers]
    assert all(files == FILES for files, _ in told)
    # Any of them may be the first in the line, and it reads the store.
    counted = sorted((fetched for _, fetched in told), key=lambda fetched: fetched.bytes)
    assert counted == [WeightsFetched(relayed_bytes=SIZE)] * 3 + [WeightsFetched(bytes=SIZE)]
    assert len(artifacts.list_files(line)) == 4


@pytest.mark.slow
def test_a_newcomer_passes_over_those_that_have_ended_and_those_that_never_were(
    version: str, line: str, start: Callable[[str], Process]
) -> None:
    first, ended, last = (start(name) for name in ("a", "b", "c"))
    for each in (first, ended):
        each.ask(version, "line", line)
        each.answer()
    ended.end()
    stranger = entry_name(time.time(), "http://127.0.0.1:1")
    for name in (stranger, "garbage", "9" * 13 + "-000000000000-127.0.0.1-2"):
        artifacts.write_bytes(f"{line}/{name}", b"\0")
    last.ask(version, "line", line)
    assert last.answer() == (FILES, WeightsFetched(relayed_bytes=SIZE, refused_sources=2))


def answers_of(address: str, paths: list[str], token: str) -> list[int]:
    found = []
    for path in paths:
        request = urllib.request.Request(f"{address}{path}", headers={"Authorization": f"Bearer {token}"})
        try:
            found.append(urllib.request.urlopen(request).status)
        except urllib.error.HTTPError as error:
            found.append(error.code)
    return found


def test_files_of_the_manifest_alone_are_passed_on_and_to_the_job_alone(
    version: str, start: Callable[[str], Process]
) -> None:
    process = start("a")
    process.ask(version)
    process.answer()
    found = artifacts.manifest(version)
    assert found is not None
    copy = hashlib.sha256(version.encode() + b"\0" + found.dump()).hexdigest()
    good = [f"/v1/copies/{copy}", f"/v1/copies/{copy}/part/model.safetensors"]
    token = copy_token(TOKEN, copy)
    assert answers_of(process.address, good, token) == [200, 200]
    assert answers_of(process.address, good, copy_token("another-jobs", copy)) == [401, 401]
    others = ["part", "..%2f..%2fetc%2fpasswd", "part/../config.json", "%2fetc%2fpasswd", f"../{copy}/config.json"]
    wrong = [f"/v1/copies/{copy}/{name}" for name in others]
    assert answers_of(process.address, wrong, token) == [404] * len(wrong)
    for other in ("0" * 64, ".."):
        assert answers_of(process.address, [f"/v1/copies/{other}"], copy_token(TOKEN, other)) == [404]


# --- sources that fail ----------------------------------------------------------------------------------------------


Answer = Callable[[http.server.BaseHTTPRequestHandler, bytes], None]


def cut_short(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(data[: len(data) // 2])


def dies(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(data[: len(data) // 2])
    handler.connection.close()


def damages(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(bytes([data[0] ^ 1]) + data[1:] if data else data)


def sends_more(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(data + b"more")


def another_version(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(bytes(len(data)))


def sticks(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(data[: len(data) // 2])
    handler.wfile.flush()
    threading.Event().wait(1.5)


def trickles(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    for number in range(40):
        handler.wfile.write(data[number : number + 1])
        handler.wfile.flush()
        threading.Event().wait(0.05)


def forgets(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
    handler.connection.close()


@contextmanager
def source(answer: Answer, status: int = 200) -> Iterator[str]:
    """The address of a server that has every version, and answers for its files like this."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/v1/copies/").partition("/")[2]
            self.send_response(status)
            self.end_headers()
            try:
                if name:
                    answer(self, FILES[name])
                else:
                    self.wfile.write(json.dumps({"relayed": True}).encode())
            except (OSError, ValueError):
                pass  # The reader, or the connection, is gone.

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("artifact_cache")
@pytest.mark.parametrize("answer", [cut_short, dies, damages, sends_more, another_version, sticks, trickles, forgets])
def test_the_store_makes_good_what_a_source_does(
    version: str, answer: Answer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "STUCK_SECONDS", 0.5)
    before = artifacts.fetched()
    with source(answer) as address:
        folder = artifacts.local_folder(version, sources=Sources([address], TOKEN))
    now = artifacts.fetched()
    assert content(version) == FILES
    assert folder == copy_place(version, artifacts.manifest(version).dump())  # type: ignore[union-attr]
    assert now.refused_sources - before.refused_sources == 1
    # No more than the empty file, and what had come before the fault, is from the source.
    assert (now.bytes - before.bytes) + (now.relayed_bytes - before.relayed_bytes) == SIZE
    assert now.bytes - before.bytes >= len(FILES["other.safetensors"])
    assert "the store is read instead" in caplog.text


@pytest.mark.usefixtures("artifact_cache")
@pytest.mark.parametrize("answer", [damages, dies, forgets])
def test_the_store_makes_good_what_an_instance_of_the_line_does(
    version: str, line: str, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    with source(answer) as address:
        artifacts.write_bytes(f"{line}/{entry_name(time.time() - 1, address)}", b"")
        artifacts.local_folder(version, sources=Sources((), TOKEN, Line(line, "http://127.0.0.1:1")))
    assert content(version) == FILES
    assert "the store is read instead" in caplog.text


@pytest.mark.usefixtures("artifact_cache")
def test_an_instance_of_the_line_learns_a_token_for_one_copy_alone(version: str, line: str) -> None:
    offered: list[str] = []

    def listens(handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
        offered.append(handler.headers["Authorization"])
        handler.wfile.write(data)

    with source(listens) as address:
        artifacts.write_bytes(f"{line}/{entry_name(time.time() - 1, address)}", b"")
        folder = artifacts.local_folder(version, sources=Sources((), TOKEN, Line(line, "http://127.0.0.1:1")))
    assert set(offered) == {f"Bearer {copy_token(TOKEN, folder.name)}"}
    assert copy_token(TOKEN, "another") not in offered[0]
    assert TOKEN not in offered[0]


@pytest.mark.usefixtures("artifact_cache")
def test_a_source_that_takes_the_token_for_another_jobs_is_not_used(
    version: str, start: Callable[[str], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start("a")
    process.ask(version)
    process.answer()
    before = artifacts.fetched()
    artifacts.local_folder(version, sources=Sources([process.address], "another-jobs"))
    now = artifacts.fetched()
    assert content(version) == FILES
    assert now.bytes - before.bytes == SIZE
    assert now.relayed_bytes == before.relayed_bytes
    assert now.refused_sources == before.refused_sources + 1


def test_an_instance_fetches_from_those_before_it_in_the_chain() -> None:
    chain = ["a", "b", "c"]
    assert Sources.of_chain(chain, "c", TOKEN).addresses == ["b", "a"]
    assert list(Sources.of_chain(chain, "a", TOKEN).addresses) == []
    assert list(Sources.of_chain(chain, "new", TOKEN).addresses) == []
    assert list(Sources.of_chain(chain, None, TOKEN).addresses) == []


def test_an_instance_that_is_not_in_the_chain_follows_others_in_the_line() -> None:
    assert Sources.of_chain(["a", "b"], "new", TOKEN, "line").line == Line("line", "new", ["a", "b"])
    assert Sources.of_chain(["a", "b"], "b", TOKEN, "line").line == Line("line", "b", ["a", "b"])
    assert Sources.of_chain(["a", "b"], "new", TOKEN).line is None


def test_the_folders_before_the_last_few_are_passed_on_no_more(tmp_path: Path) -> None:
    for number in range(5):
        relaying.relay(str(number), {}, tmp_path)
    assert relaying.relayed("0") is None
    assert relaying.relayed("4") is not None
