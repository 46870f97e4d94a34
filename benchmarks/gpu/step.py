"""Parts of `measure.py`: GRPO steps by `rlhfless run`, and the same by TRL's GRPOTrainer with the same engine."""

import json
import os
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.gpu.accelerator import model_dtype
from benchmarks.gpu.engines import best_engine
from benchmarks.gpu.job import REWARD, job_document
from benchmarks.gpu.shapes import WORK, save_prompts
from benchmarks.shared.peak_memory import PeakMemory

TRL = Path(__file__).resolve().parent / "trl_step.py"


def measure_ours(name: str, model: Path, scratch: Path, threads: int) -> dict[str, Any]:
    """The job's steps; the first, which pays for the start, and the last, which writes a checkpoint, don't count.

    Args:
        name: of the shape.
        model: its folder.
        scratch: for what the job writes.
        threads: of the CPU.
    """
    prompts, reward = _inputs(name, scratch)
    engine = _engine()
    job = job_document(name, engine, model_dtype(), model, prompts, reward)
    document, runs = scratch / "job.yaml", scratch / "runs"
    document.write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(document), "--artifacts", str(runs)]
    peak = _run([*command, "--threads", str(threads)], scratch / "rlhfless.log", threads)
    lines = (runs / job["metadata"]["name"] / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["step"] > 0]
    counted = records[1:-1]
    told = [name for name in counted[-1]["metrics"] if name.startswith(("seconds", "weights", "tokens", "mismatch"))]
    return {
        "median_step_seconds": statistics.median(record["seconds"] for record in counted),
        "step_seconds": [record["seconds"] for record in records],
        "stage_seconds": {
            stage: statistics.median(record["stages"][stage] for record in counted) for stage in counted[0]["stages"]
        },
        "metrics": {name: counted[-1]["metrics"][name] for name in told},
        "response_tokens": statistics.fmean(record["metrics"]["lengths/mean"] for record in records),
        **_described(name, engine, peak),
    }


def measure_trl(name: str, model: Path, scratch: Path, threads: int) -> dict[str, Any]:
    """The same by TRL; the first step does not count.

    Args:
        name: of the shape.
        model: its folder.
        scratch: for what it writes.
        threads: of the CPU.
    """
    if find_spec("trl") is None:
        return {"not_measured": "trl is not installed here: pip install trl"}
    prompts, reward = _inputs(name, scratch)
    engine, output = _engine(), scratch / "measured.json"
    command = [sys.executable, str(TRL), name, engine, *map(str, (model, prompts, reward, output))]
    peak = _run(command, scratch / "trl.log", threads)
    measured: dict[str, Any] = json.loads(output.read_text())
    return {
        "median_step_seconds": statistics.median(measured["step_seconds"][1:]),
        **measured,
        **_described(name, engine, peak),
    }


def _inputs(name: str, scratch: Path) -> tuple[Path, Path]:
    """The prompts and the reward of both sides."""
    scratch.mkdir(parents=True)
    prompts, reward = scratch / "prompts.jsonl", scratch / "reward.py"
    save_prompts(WORK[name], prompts)
    reward.write_text(REWARD)
    return prompts, reward


def _engine() -> str:
    """Of both sides: vLLM beside TRL's trainer, in one process, needs a GPU."""
    return best_engine() if torch.cuda.is_available() else "transformers"


def _described(name: str, engine: str, peak: PeakMemory) -> dict[str, Any]:
    """What was done, and the most memory that it took: in the host's, and in the GPU's as `nvidia-smi` tells it."""
    work = WORK[name]
    return {
        "engine": engine,
        "trained": f"an adapter of rank {work.lora_rank}" if work.lora_rank else "all weights",
        "samples": work.samples,
        "peak_host_bytes": peak.everything,
        "peak_gpu_bytes": peak.gpu,
    }


def _run(command: list[str], log: Path, threads: int) -> PeakMemory:
    """Run one side to its end; what it says is in the error if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        peak = PeakMemory(process.pid)
        status = process.wait()
    if status != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{last}")
    return peak
