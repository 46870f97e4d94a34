"""Steps of a quickstart, generated again with drafting and without, from what earlier steps sampled.

    python benchmarks/drafting/steps.py [--run RUN] [--steps 9 10 12 16 24] [--untrained] [--json FILE]

RUN is the folder of a quickstart of which all weights and rollouts were kept; without it, one is trained first (26
steps). Two engines generate each actor's share in turns, one that drafts and one that does not, each on one thread and
with what it has learnt of drafting in the shares before. Both must sample the same, log-probabilities included. The CPU
time of the engines' steps counts, by the size of the batch.

With `--untrained` a model of the same shape with random weights generates all steps. Its tokens are nearly uniform, so
nothing repeats, and drafts are hardly ever right.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared.places import QUICKSTART
from benchmarks.shared.records import described_run, write_record
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.data.draft_history import vocabulary_digest, write_draft_history
from rlhfless_functions.data.rollouts import GeneratedSample, read_rollouts
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.settings import ModelSettings, SamplingSettings

SAMPLING = SamplingSettings(max_prompt_tokens=128, max_response_tokens=224)
STEPS_A_PASS = 8
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Least sequences of each class of passes."""
KEEPING = """
import sys
import rlhfless_operator.training.journal.step_journal as journal
journal.remove_garbage = lambda *_, **__: None
from rlhfless_operator.cli import main
sys.argv = ["rlhfless", "run", "grpo.yaml", "--artifacts", "runs"]
sys.exit(main())
"""


def train(folder: Path, steps: int) -> Path:
    """A quickstart of which everything is kept."""
    shutil.copytree(QUICKSTART, folder, dirs_exist_ok=True)
    job = yaml.safe_load((folder / "grpo.yaml").read_text())
    job["spec"]["steps"] = steps
    (folder / "grpo.yaml").write_text(yaml.safe_dump(job))
    subprocess.run([sys.executable, "-c", KEEPING], cwd=folder, check=True, stdout=sys.stderr)
    return folder / "runs" / job["metadata"]["name"]


def untrained(model: str, folder: Path) -> Path:
    """A model of the same shape with random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def share_of(actor: Path) -> list[GeneratedSample]:
    """What an actor finished in a step."""
    return [each for each in read_rollouts(sorted(map(str, actor.glob("*.parquet")))).values() if each.finished]


class Measured:
    """CPU seconds and passes of an engine by the sequences of the pass."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = defaultdict(float)
        self.passes: dict[int, int] = defaultdict(int)
        self.tokens: dict[int, int] = defaultdict(int)

    def add(self, sequences: int, seconds: float, tokens: int) -> None:
        least = max(each for each in BATCHES if each <= max(1, sequences))
        self.seconds[least] += seconds
        self.passes[least] += 1
        self.tokens[least] += tokens

    def numbers(self) -> dict[str, Any]:
        by_batch = {
            str(least): {"seconds": self.seconds[least], "passes": self.passes[least], "tokens": self.tokens[least]}
            for least in BATCHES
            if self.passes[least]
        }
        return {"seconds": sum(self.seconds.values()), "passes": sum(self.passes.values()), "by_batch": by_batch}


def generate(
    engine: TransformersEngine, tasks: Sequence[SequenceTask], drafts: list[str] | None, measured: Measured
) -> tuple[dict[tuple[int, int], Any], dict[str, float]]:
    """A share, and how it was decoded."""
    run = engine.start(tasks, SAMPLING, None, drafts)
    if run._drafter is not None and run._drafter._history is not None:
        run._drafter._history._thread.join()
    results = {}
    while run.running or run.waiting:
        before = run.computed.response
        began = time.process_time()
        ended = run.step()
        took = time.process_time() - began
        measured.add(run.running + len(ended), took, run.computed.response - before)
        results |= {(each.prompt, each.index): each for each in ended}
    return results, run.decoding().model_dump()


def measure(run: Path, steps: Sequence[int], folder: Path, *, random_weights: bool) -> list[dict[str, Any]]:
    """Steps in their order."""
    torch.set_num_threads(1)
    model = yaml.safe_load((run / "job.yaml").read_text())["spec"]["model"]["source"]
    settings = ModelSettings(source=model, dtype="float32")
    digest = vocabulary_digest(AutoTokenizer.from_pretrained(model).get_vocab())
    sampled = {
        number: [share_of(actor) for actor in sorted((run / "rollouts" / f"step-{number:06}").iterdir())]
        for number in range(1, max(steps) + 1)
    }
    given = untrained(model, folder / "untrained") if random_weights else None
    visits: dict[int, int] = {}
    engines = {"never": TransformersEngine(), "auto": TransformersEngine()}
    rows = []
    for number in range(1, max(steps) + 1):
        shares = sampled[number]
        if number in steps:
            known = {visits[each.prompt] for share in shares for each in share if each.prompt in visits}
            drafts = [str(folder / f"step-{step}") for step in sorted({*known, number - 1} - {0})]
            uri = given or (run / "weights" / f"step-{number - 1:06}" if number > 1 else Path(model))
            measured = {drafting: Measured() for drafting in engines}
            counts: dict[str, float] = defaultdict(float)
            for share in shares:
                tasks = [
                    SequenceTask(
                        each.prompt, each.index, each.prompt_tokens,
                        sample_seed(0, "training", number, each.prompt, each.index),
                    )
                    for each in sorted(share, key=lambda each: -len(each.response_tokens))
                ]  # fmt: skip
                found = []
                for drafting, engine in engines.items():
                    engine.load(settings, WeightsReference(version=number - 1, uri=str(uri)))
                    results, decoding = generate(
                        engine, tasks, drafts if drafting == "auto" else None, measured[drafting]
                    )
                    found.append(results)
                    if drafting == "auto":
                        for name, value in decoding.items():
                            counts[name] += value
                if found[0] != found[1]:
                    raise SystemExit(f"step {number}: drafting has changed a sample")
            rows.append(
                {
                    "step": number,
                    "samples": sum(map(len, shares)),
                    "cpu_against_never": measured["auto"].numbers()["seconds"] / measured["never"].numbers()["seconds"],
                    "tokens_a_pass": counts["tokens"] / counts["sequence_passes"],
                    "coverage": counts["matched"] / max(1, counts["looked_up"]),
                    "acceptance": counts["accepted"] / max(1, counts["judged"]),
                    "counts": dict(counts),
                    **{drafting: each.numbers() for drafting, each in measured.items()},
                }
            )
            print(json.dumps({name: rows[-1][name] for name in list(rows[-1])[:6]}), file=sys.stderr, flush=True)
        part = folder / f"step-{number}"
        part.mkdir()
        write_draft_history(str(part / "part.parquet"), [each for share in shares for each in share], digest)
        visits |= {each.prompt: number for share in shares for each in share}
    return rows


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--steps", type=int, nargs="*", default=[9, 10, 12, 16, 24])
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = arguments.run or train(Path(scratch) / "quickstart", max(arguments.steps))
        history = Path(scratch) / "history"
        history.mkdir()
        rows = measure(run, arguments.steps, history, random_weights=arguments.untrained)
    result = {**described_run(["torch", "transformers", "numpy"]), "steps": rows}
    write_record(result, arguments.json)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
