"""Time until the last of eight instances has new weights: in a chain of relays, in a line, and from a store.

    python benchmarks/weights/relays.py [--instances 8] [--rate 10] [--json FILE]

Each instance is a process with an instance's server and a folder of copies of its own. It has read the version before,
a tiny one, and so has loaded its S3 client. In the chain each is told which come before it. In the line all are new,
begin at once, and find each other in the store. The store is an S3 server on this machine. A proxy before the store,
and one before each instance, lets `--rate` MB/s through to all of its readers together, and delays each connection's
first bytes by 10 ms. One machine does all the work; times are compared as multiples of one transfer.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shared.links import Link
from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.s3_server import start_s3_server
from benchmarks.weights.one_instance import TOKEN

INSTANCE = f"""
import asyncio, os, sys, time
import uvicorn
from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import Line, Sources, peers
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.serving.server import InstanceServer, create_app

def listening(port):
    print(port, flush=True)

peers.PATIENCE_SECONDS = 30.0
instance = Instance("generation", None, name="one", started_at=0.0)
config = uvicorn.Config(create_app(instance, token={TOKEN!r}), port=0, log_config=None, lifespan="off")

async def main():
    loop = asyncio.get_running_loop()
    serving = asyncio.create_task(InstanceServer(config, instance, listening).serve())
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        way, uri, *addresses = line.split()
        sources = Sources(addresses, {TOKEN!r}) if way == "chain" else None
        if way == "line":
            folder, address = addresses
            sources = Sources((), {TOKEN!r}, Line(folder, address))
        await loop.run_in_executor(None, lambda: artifacts.local_folder(uri, sources=sources))
        now = artifacts.fetched()
        print(time.time(), now.bytes, now.relayed_bytes, now.refused_sources, flush=True)
    os._exit(0)

asyncio.run(main())
"""


class Receiver:
    """A process that fetches versions, behind a link of its own."""

    def __init__(self, cache: Path, rate: float) -> None:
        environment = {**os.environ, "RLHFLESS_CACHE": str(cache)}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", INSTANCE], stdin=pipe, stdout=pipe, env=environment, text=True, bufsize=1
        )
        self.address = Link(("127.0.0.1", int(self.line())), rate).address

    def ask(self, *words: str) -> None:
        """Let it fetch."""
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)

    def line(self) -> str:
        """What it says next."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def told(self) -> list[float]:
        """When it had fetched what it was asked for, in seconds; bytes from the store and from others until then, and
        others that were of no use."""
        return list(map(float, self.line().split()))

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()


def measure(before: str, uri: str, count: int, rate: float, way: str) -> dict[str, float]:
    """Fetch a version with some instances at once: in a `chain`, a `line`, or each from the `store`.

    Args:
        before: URI of the version that they have.
        uri: URI of the version that they fetch.
    """
    with tempfile.TemporaryDirectory() as place:
        receivers = [Receiver(Path(place, str(number)), rate) for number in range(count)]
        try:
            addresses = [each.address for each in receivers]
            for receiver in receivers:
                receiver.ask("store", before)
            ready = [receiver.told() for receiver in receivers]
            began = time.time()
            for number, receiver in enumerate(receivers):
                line = [f"{uri}-line", receiver.address]
                receiver.ask(way, uri, *(line if way == "line" else addresses[:number][::-1]))
            told = [receiver.told() for receiver in receivers]
        finally:
            for receiver in receivers:
                receiver.end()
    seconds = sorted(each[0] - began for each in told)
    stored, relayed, refused = (sum(each[i] for each in told) - sum(each[i] for each in ready) for i in (1, 2, 3))
    return {
        "first_seconds": round(seconds[0], 2),
        "last_seconds": round(seconds[-1], 2),
        "bytes_from_store": stored,
        "bytes_relayed": relayed,
        "sources_refused": refused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=126)
    parser.add_argument("--rate", type=float, default=10.0, help="MB/s of each link")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    from rlhfless_functions import artifacts

    size, rate = given.megabytes * 10**6, given.rate * 1e6
    bucket, address = start_s3_server()
    before, uri = (f"{bucket}/weights/step-{step}" for step in (0, 1))
    for version, content in ((before, b""), (uri, random.Random(0).randbytes(size))):
        with artifacts.publish(version) as folder:
            (folder / "model.safetensors").write_bytes(content)
    os.environ["AWS_ENDPOINT_URL"] = Link(address, rate).address
    one = size / rate
    record = {"version_bytes": size, "link_bytes_per_second": rate, "instances": given.instances}
    record |= {"one_transfer_seconds": one}
    # The last of 4 MiB comes before any of it is passed on.
    expected = (size + (given.instances - 1) * min(size, 4 * 2**20)) / rate
    forecasts = {"chain": expected, "line": expected, "store": given.instances * size / rate}
    for way in forecasts:
        found = measure(before, uri, given.instances, rate, way)
        found |= {"last_transfers": round(found["last_seconds"] / one, 3)}
        found |= {"forecast_transfers": round(forecasts[way] / one, 3)}
        record[way] = found
        print(way, found, flush=True)
    write_record({**record, **described_run(["s3fs", "moto", "uvicorn"])}, given.json)


if __name__ == "__main__":
    main()
