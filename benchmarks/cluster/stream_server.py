"""Generation instances of which nothing exists but the streams: each does what an actor does on the wire, cheaply.

    python -m benchmarks.cluster.stream_server

It prints its port. A stream tells its progress each second, or as rarely as it is asked to. Every five seconds it
flushes: it announces the tokens of all running samples, and one sample that has finished. These are the rates of real
instances, with the default `generation.flush`. With --idle it sends heartbeats alone. A GET of any path answers with
what there is.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable

_PROGRESS_SECONDS = 1.0
_FLUSH_SECONDS = 5.0
_HEARTBEAT_SECONDS = 5.0
_TOKENS = 30
"""Tokens that each sample gets in a second."""
_LEAST_RUNNING = 40
"""Samples of a stream that never finish. They keep the planner from emptying an actor into another."""


class Counts:
    """What the server has sent."""

    def __init__(self) -> None:
        self.streams = self.events = self.sent_bytes = 0


class Stream(asyncio.Protocol):
    """One connection: a request, then its events until the client has enough."""

    def __init__(self, counts: Counts, idle: bool) -> None:
        self._counts, self._idle = counts, idle
        self._received = bytearray()
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._flushes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._counts.streams -= bool(self._timers)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, ended, body = bytes(self._received).partition(b"\r\n\r\n")
        if ended and head.startswith(b"GET"):
            text = json.dumps(vars(self._counts)).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            self._received.clear()
        elif ended and not self._timers:
            # The request is the first line of the first chunk. The body stays open.
            line, complete, _ = body.partition(b"\r\n")[2].partition(b"\n")
            if complete:
                self._begin(json.loads(line))

    def _begin(self, request: dict) -> None:
        self._received.clear()
        self._keys = [f"{sample['prompt']},{sample['index']}" for sample in request["samples"]]
        self._names = [
            f'{{"prompt":{sample["prompt"]},"index":{sample["index"]},"tokens":' for sample in request["samples"]
        ]
        self._sink, self._began = request["sink"], time.monotonic()
        self._period = _HEARTBEAT_SECONDS if self._idle else request.get("progress_seconds", _PROGRESS_SECONDS)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(head)
        name = f"{request['key']['job_uid'][:8]}-{request['key']['part']}"
        self._say(f'{{"event":"started","protocol":"1.0","instance":"{name}"}}\n')
        room = '"room":{"sequences":256,"kv_tokens":1000000},' if not self._idle else ""
        self._say(self._progress(room))
        self._counts.streams += 1
        # Streams begin together, and report apart.
        apart = (hash(name) % 1000) / 1000
        self._again(self._report, self._period * apart)
        if not self._idle:
            self._again(self._flush, _FLUSH_SECONDS * apart)

    def _again(self, what: Callable[[], None], seconds: float) -> None:
        self._timers[what] = asyncio.get_running_loop().call_later(seconds, what)

    def _report(self) -> None:
        self._again(self._report, self._period)
        self._say('{"event":"heartbeat","still_seconds":0.0}\n' if self._idle else self._progress())

    def _flush(self) -> None:
        self._again(self._flush, _FLUSH_SECONDS)
        self._flushes += 1
        part = f'"part":"{self._sink}/{self._flushes}.parquet"'
        self._say(f'{{"event":"partial","samples":[{self._samples(self._names, "cut")}],{part}}}\n')
        if len(self._names) > _LEAST_RUNNING:
            self._keys.pop()
            done = self._samples([self._names.pop()], "stop")
            self._say(f'{{"event":"sample","samples":[{done}],{part}}}\n')

    def _progress(self, more: str = "") -> str:
        tokens = str(self._tokens())
        lengths = f",{tokens}],[".join(self._keys)
        return (
            f'{{"event":"progress","finished":0,"running":{len(self._keys)},"waiting":0,"tokens":{tokens},{more}'
            f'"lengths":[[{lengths},{tokens}]],"decoding":{{}},"prefetched_version":null,"weights_bytes":null}}\n'
        )

    def _samples(self, names: list[str], reason: str) -> str:
        end = f'{self._tokens()},"finish_reason":"{reason}"}}'
        return f"{end},".join(names) + end

    def _tokens(self) -> int:
        return int(_TOKENS * (time.monotonic() - self._began))

    def _say(self, line: str) -> None:
        data = line.encode()
        self._counts.events += 1
        self._counts.sent_bytes += len(data)
        self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))


async def serve(idle: bool) -> None:
    """Serve until the process is ended."""
    counts = Counts()
    server = await asyncio.get_running_loop().create_server(lambda: Stream(counts, idle), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idle", action="store_true", help="send heartbeats alone")
    asyncio.run(serve(parser.parse_args().idle))
