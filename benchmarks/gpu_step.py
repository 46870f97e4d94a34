"""Part of `gpu.py`: GRPO steps by `rlhfless run` and by TRL's GRPOTrainer, with the same engine on both sides."""

import json
import os
import statistics
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerator import model_dtype
from attempts import attempt
from gpu_engines import best_engine
from gpu_job import REWARD, job_document
from peak_memory import PeakMemory
from shapes import WORK, save_prompts

STEPS = 5
"""Of each side. The first pays for the start and does not count; neither does our last, which writes a checkpoint."""
HERE = Path(__file__).resolve().parent


def measure(name: str, model: Path, scratch: Path, threads: int) -> dict[str, Any]:
    """Both sides, one after the other; TRL's is not measured where it is not installed.

    Args:
        name: of the shape.
        model: its folder.
        scratch: for what they write.
        threads: of the CPU.
    """
    work = WORK[name]
    scratch.mkdir(parents=True)
    prompts, reward = scratch / "prompts.jsonl", scratch / "reward.py"
    save_prompts(work, prompts)
    reward.write_text(REWARD)
    # vLLM beside TRL's trainer, in one process, needs a GPU; both sides take the same engine.
    engine = best_engine() if torch.cuda.is_available() else "transformers"
    found: dict[str, Any] = {
        "engine": engine,
        "trained": f"an adapter of rank {work.lora_rank}" if work.lora_rank else "all weights",
        "samples": work.prompts * 8,
        "prompt_tokens": work.prompt_tokens,
        "activation_checkpointing": work.checkpointing,
    }
    for side, measured in {"rlhfless": _ours, "trl": _trl}.items():
        found[side] = attempt(partial(measured, name, engine, model, prompts, reward, scratch, threads))
    medians = [found[side].get("median_step_seconds") for side in ("trl", "rlhfless")]
    return found | ({"times_as_fast": medians[0] / medians[1]} if all(medians) else {})


def _ours(
    name: str, engine: str, model: Path, prompts: Path, reward: Path, scratch: Path, threads: int
) -> dict[str, Any]:
    job = job_document(name, engine, model_dtype(), model, prompts, reward, STEPS)
    document, runs = scratch / "job.yaml", scratch / "runs"
    document.write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(document)]
    peak = _run([*command, "--artifacts", str(runs), "--threads", str(threads)], scratch / "rlhfless.log", threads)
    lines = (runs / job["metadata"]["name"] / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["step"] > 0]
    counted = records[1:-1]
    # In their order, so that what is read is what a step goes through.
    seconds = [metric for metric in records[-1]["metrics"] if metric.startswith("seconds")]
    return {
        "median_step_seconds": statistics.median(record["seconds"] for record in counted),
        "step_seconds": [record["seconds"] for record in records],
        "stage_seconds": {
            stage: statistics.median(record["stages"][stage] for record in counted) for stage in counted[0]["stages"]
        },
        "learning_seconds": {
            metric: statistics.median(record["metrics"][metric] for record in counted if metric in record["metrics"])
            for metric in seconds
            if any(metric in record["metrics"] for record in counted)
        },
        "response_tokens": statistics.fmean(record["metrics"]["lengths/mean"] for record in records),
        **_peaks(peak),
    }


def _trl(
    name: str, engine: str, model: Path, prompts: Path, reward: Path, scratch: Path, threads: int
) -> dict[str, Any]:
    if find_spec("trl") is None:
        return {"not_measured": "trl is not installed here: pip install trl"}
    output = scratch / "trl.json"
    command = [sys.executable, str(HERE / "gpu_trl.py"), name, engine, *map(str, (model, prompts, reward))]
    peak = _run([*command, str(STEPS), str(output)], scratch / "trl.log", threads)
    measured: dict[str, Any] = json.loads(output.read_text())
    return {"median_step_seconds": statistics.median(measured["step_seconds"][1:])} | measured | _peaks(peak)


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


def _peaks(peak: PeakMemory) -> dict[str, int | None]:
    """In the host's memory, and in the GPU's as `nvidia-smi` tells it."""
    return {"peak_host_bytes": peak.everything, "peak_gpu_bytes": peak.gpu}
