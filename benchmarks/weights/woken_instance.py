"""First token of a woken instance: weights used as they come, against loading everything first.

    python benchmarks/weights/woken_instance.py [--engine vllm] [--rate 50] [--tokens 128] [--repeats 5] [--json FILE]

The engine in a fresh process, whose imports are done, loads a Qwen3 of 126 MB and samples one token for each of 8
prompts of `--tokens` tokens with one thread. The weights are in a folder of this machine, in its page cache, or in a
store that is an HTTP server behind a link of `--rate` MB/s. Both ways take turns within one run, each time in a process
of its own with an empty folder of copies. The tokens and their log-probabilities must be the same.

With `--engine vllm` it runs in the environment that `make test-vllm` makes. A GPU's instances import vLLM as they
start: `--import-vllm` counts this, too.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from benchmarks.shared.links import Link
from benchmarks.shared.places import QUICKSTART
from benchmarks.shared.random_models import random_qwen3
from benchmarks.shared.records import described_run, write_record

PROMPTS = 8
INSTANCE = """
import json, sys, time
import torch
from rlhfless_functions import weights as stored
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.settings import EngineSampling, EngineSettings, ModelSettings

name, way, uri, prompts, tokens = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
torch.set_num_threads(1)
torch.set_flush_denormal(True)
if name == "transformers":
    from rlhfless_functions.generation.engines.transformers import TransformersEngine as Engine
    from transformers import Qwen3ForCausalLM
else:
    from rlhfless_functions.generation.engines.vllm.engine import VllmEngine as Engine
    if name == "vllm":
        from rlhfless_functions.generation.engines.choice import preimport_engine
        preimport_engine(EngineSettings(name="vllm"), ModelSettings(source=uri))
if way == "whole" and name == "transformers":
    stored.load_arriving = lambda *_: None
elif way == "whole":
    from rlhfless_functions.generation.engines.vllm import arriving
    begins = arriving.arriving_folder
    def whole(*given):
        folder = begins(*given)
        folder.result()
        return folder
    arriving.arriving_folder = whole
tasks = [SequenceTask(row, 0, [2 + (row + place) % 60 for place in range(tokens)], row) for row in range(prompts)]
began = time.perf_counter()
settings = EngineSettings(sequence_tokens=tokens + 4, kv_budget_tokens=prompts * (tokens + 64))
engine = Engine() if name == "transformers" else Engine(settings)
engine.load(ModelSettings(source=uri, dtype="float32"), WeightsReference(version=1, uri=uri))
loaded = time.perf_counter()
run = engine.start(tasks, EngineSampling(max_prompt_tokens=tokens, max_response_tokens=4), None)
run.await_weights()
awaited = time.perf_counter()
run.step()
first = time.perf_counter()
found = sorted((task.prompt, task.response_tokens, task.log_probs) for task in run.unfinished())
print(json.dumps([loaded - began, awaited - loaded, first - began, found]))
"""


def first_token(engine: str, way: str, uri: str, tokens: int) -> tuple[list[float], object]:
    """Seconds until `load` returns, of the wait for the weights, and until the first token; and what was sampled."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "RLHFLESS_CACHE": cache}
        command = [sys.executable, "-c", INSTANCE, engine, way, uri, str(PROMPTS), str(tokens)]
        told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    *seconds, sampled = json.loads(told.strip().splitlines()[-1])
    return seconds, sampled


def serve_files(place: Path) -> http.server.ThreadingHTTPServer:
    """An HTTP server of a folder, which sends parts of files, too."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._send(body=False)

        def do_GET(self) -> None:
            self._send(body=True)

        def _send(self, *, body: bool) -> None:
            path = place / self.path.lstrip("/")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            size = path.stat().st_size
            part = self.headers.get("Range", "").removeprefix("bytes=")
            first, _, last = part.partition("-") if part else ("0", "", "")
            start, end = int(first), min(int(last) + 1, size) if last else size
            self.send_response(206 if part else 200)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Accept-Ranges", "bytes")
            if part:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            if body:
                with path.open("rb") as file:
                    self.connection.sendfile(file, start, end - start)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--import-vllm", action="store_true", help="count the import of vLLM, too")
    parser.add_argument("--rate", type=float, default=50.0, help="MB/s of the link to the store")
    parser.add_argument("--tokens", type=int, default=128, help="length of each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    engine = "vllm and its import" if given.import_vllm else given.engine
    from transformers import AutoTokenizer

    from rlhfless_functions import artifacts

    with tempfile.TemporaryDirectory() as place:
        server = serve_files(Path(place))
        link = Link(("127.0.0.1", server.server_address[1]), given.rate * 1e6)
        places = {"disk": f"{place}/step-1", "store": f"{link.address}/step-1"}
        with artifacts.publish(places["disk"]) as folder:
            random_qwen3().save_pretrained(folder)
            AutoTokenizer.from_pretrained(QUICKSTART / "model").save_pretrained(folder)
        record: dict[str, object] = {
            "engine": engine,
            "link_bytes_per_second": given.rate * 1e6,
            "prompt_tokens": given.tokens,
        }
        for name, uri in places.items():
            found: dict[str, list[list[float]]] = {"whole": [], "as they come": []}
            sampled = []
            for _ in range(given.repeats):
                for way, told in found.items():
                    seconds, samples = first_token(engine, way, uri, given.tokens)
                    told.append(seconds)
                    sampled.append(samples)
            assert all(each == sampled[0] for each in sampled), "the tokens differ"
            result: dict[str, object] = {}
            for way, told in found.items():
                load, wait, first = (round(statistics.median(column), 3) for column in zip(*told, strict=True))
                result[way] = {"load_seconds": load, "wait_seconds": wait, "first_token_seconds": first}
            pairs = zip(found["as they come"], found["whole"], strict=True)
            ratios = sorted(round(early[2] / late[2], 3) for early, late in pairs)
            record[name] = result | {"ratio": statistics.median(ratios), "ratios": ratios}
            print(name, record[name], flush=True)
    write_record({**record, **described_run(["torch", "transformers", "fsspec", "aiohttp"])}, given.json)
    server.shutdown()


if __name__ == "__main__":
    main()
