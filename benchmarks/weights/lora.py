"""Bytes that a training step ships and holds with `model.lora`, beside training all weights.

    python benchmarks/weights/lora.py [--rank 16] [--json FILE]

On the quickstart's model and on one of 126 MB with random weights, in float32, with an adapter on all linear layers:

- Bytes a step: from the metrics of a step of `rlhfless run`, with the seconds to publish a version.
- Taking over: seconds until a live transformers engine has the next version, checksums compared (fastest of ten).
- Memory: private memory of a process that has computed with the policy (Linux's anonymous pages). A backbone below an
  adapter is memory-mapped: its pages belong to the file cache, which all processes of all jobs on a machine share.
- Reference: log-probabilities by the reference policy of a trained version, the backbone with the adapter off, against
  those of the given model. The largest difference must be 0.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.places import QUICKSTART
from benchmarks.shared.random_models import random_qwen3
from benchmarks.shared.records import described_run, write_record

SMALL: dict[str, Any] = {
    "steps": 1,
    "sampling": {"temperature": 1.0, "maxPromptTokens": 128, "maxResponseTokens": 32},
    "batch": {"promptsPerStep": 4, "samplesPerPrompt": 4, "microbatchTokens": 2048},
    "optimizer": {"learningRate": 1.0e-3},
}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TAKE_OVERS = 10

HOLDER = """
import re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import load_policy
model = ModelSettings.model_validate_json(sys.argv[1])
def anonymous():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Anonymous: +(\\d+) kB", rollup, re.MULTILINE)[1])
held = []
for _ in range(2):  # What the first one takes besides is the libraries'.
    before = anonymous()
    held.append(load_policy(model, WeightsReference(version=0, uri=model.source)).requires_grad_(False))
    held[-1](input_ids=torch.arange(32)[None])
print(anonymous() - before)
"""


def make_models(folder: Path) -> dict[str, Path]:
    """The quickstart's model, and a larger one with its tokenizer."""
    large = folder / "model-126"
    shutil.copytree(QUICKSTART / "model", large)
    random_qwen3().save_pretrained(large)
    return {"quickstart": QUICKSTART / "model", "126 MB": large}


def train(name: str, model: dict[str, Any], folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics of a job's one step, and the weights that it ends with."""
    document = yaml.safe_load((QUICKSTART / "grpo.yaml").read_text())
    spec = {key: value for key, value in document["spec"].items() if key not in ("evaluation", "checkpoints")}
    spec |= {"model": model, "artifacts": {"uri": str(folder / "runs")}, **SMALL}
    work = folder / name
    work.mkdir()
    for file in ("train.jsonl", "reward.py"):
        shutil.copy(QUICKSTART / file, work)
    (work / "job.yaml").write_text(yaml.safe_dump({**document, "metadata": {"name": name}, "spec": spec}))
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(work / "job.yaml"), "--threads", "1"]
    subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (line,) = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    status = json.loads((folder / "runs" / name / "status.json").read_text())
    return json.loads(line)["metrics"], status["weights"]


def take_over(model: dict[str, Any], weights: dict[str, Any]) -> float:
    """Seconds in which a live engine has other weights."""
    from rlhfless_functions.api import WeightsReference
    from rlhfless_functions.generation.engines.transformers import TransformersEngine
    from rlhfless_functions.settings import ModelSettings

    settings, trained = ModelSettings.model_validate(model), WeightsReference.model_validate(weights)
    engine = TransformersEngine()
    seconds = []
    for _ in range(TAKE_OVERS):
        engine.load(settings, WeightsReference(version=0, uri=settings.source))
        began = time.perf_counter()
        engine.load(settings, trained)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def reference_difference(model: dict[str, Any], weights: dict[str, Any]) -> dict[str, float]:
    """Largest differences of log-probabilities from the given model: the reference's, and the trained policy's."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlhfless_functions.api import WeightsReference
    from rlhfless_functions.model.forward import collate, response_log_probs
    from rlhfless_functions.preparation.models import PreparationModels
    from rlhfless_functions.settings import ModelSettings

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, 60, (8, 64), generator=generator).tolist()
    batch = collate([row[:16] for row in tokens], [row[16:] for row in tokens], 0)
    settings = ModelSettings.model_validate(model)
    models = PreparationModels()
    models.use(settings)
    with torch.inference_mode():
        given, _ = response_log_probs(AutoModelForCausalLM.from_pretrained(settings.source).eval(), batch, 1.0)
        policy, _ = response_log_probs(models.policy(WeightsReference.model_validate(weights)), batch, 1.0)
        with models.reference(WeightsReference(version=0, uri=settings.source)) as module:
            reference, _ = response_log_probs(module, batch, 1.0)
    return {"reference": float((reference - given).abs().max()), "policy": float((policy - given).abs().max())}


def held_bytes(model: dict[str, Any]) -> int:
    """Memory that a process with the policy has for itself because of it."""
    from rlhfless_functions.settings import ModelSettings

    command = [sys.executable, "-c", HOLDER, ModelSettings.model_validate(model).model_dump_json()]
    return int(subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout)


def measure(source: Path, rank: int, folder: Path) -> dict[str, Any]:
    """One model, with an adapter and with all weights."""
    found: dict[str, Any] = {}
    plain: dict[str, Any] = {"source": str(source), "dtype": "float32"}
    for kind, model in (("adapter", plain | {"lora": {"rank": rank}}), ("all weights", plain)):
        name = f"{folder.name}-{kind.split()[0]}".lower()
        metrics, weights = train(name, model, folder)
        found[kind] = {
            "bytes_a_step": metrics["weights/bytes"],
            "publish_seconds": metrics["seconds/publish"],
            "take_over_seconds": take_over(model, weights),
            "held_bytes": held_bytes(model),
        }
        if kind == "adapter":
            found["full_bytes"] = metrics["weights/full_bytes"]
            found["largest_difference_to_the_given_model"] = reference_difference(model, weights)
    found["share_of_full_bytes"] = found["adapter"]["bytes_a_step"] / found["full_bytes"]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write everything here")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    results: dict[str, Any] = {
        **described_run(("torch", "transformers", "peft")),
        "rank": arguments.rank,
        "models": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, source in make_models(Path(scratch)).items():
            folder = Path(scratch) / name.replace(" ", "-")
            folder.mkdir()
            found = results["models"][name] = measure(source, arguments.rank, folder)
            adapter, full = found["adapter"], found["all weights"]
            difference = found["largest_difference_to_the_given_model"]
            print(
                f"{name}: a step ships {adapter['bytes_a_step'] / 1e6:.2f} MB as an adapter,"
                f" {full['bytes_a_step'] / 1e6:.2f} MB as all weights ({found['share_of_full_bytes']:.1%});"
                f" published in {adapter['publish_seconds'] * 1e3:.0f} and {full['publish_seconds'] * 1e3:.0f} ms,"
                f" taken over in {adapter['take_over_seconds'] * 1e3:.1f} and {full['take_over_seconds'] * 1e3:.1f} ms;"
                f" a process holds {adapter['held_bytes'] / 1e6:.0f} and {full['held_bytes'] / 1e6:.0f} MB of its own;"
                f" log-probabilities differ from the given model's by {difference['reference']:g} as the reference,"
                f" by {difference['policy']:.3g} as the policy"
            )
            if difference["reference"] != 0:
                sys.exit(f"{name}: the reference is not the model that was given")
    write_record(results, arguments.json)


if __name__ == "__main__":
    main()
