"""Our learner against TRL's on the same batch: a GRPO update's tokens per second and peak memory, as ratios.

    python benchmarks/peers/learner.py [--sizes small,small-long] [--rounds 3] [--threads 2] [--json FILE]

Both take the same optimizer updates on the same random model and the same ragged samples: groups of eight that share
a prompt, one update over all of them, AdamW, float32, the same samples in a micro-batch at most. TRL's side is its own
`GRPOTrainer`: its padding (all prompts to the longest on the left, all completions to the longest on the right), its
loss and its tiled head. Each measurement is a process of its own, the two sides take turns, and the first update of a
process does not count. The gradient's norm must be the same on both sides.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.learner.batches import (
    SAMPLES_PER_PROMPT,
    Sample,
    draw_samples,
    learn_request,
    longest_sequence,
    prepared_samples,
)
from benchmarks.shared.random_models import save_small_tokenizer
from benchmarks.shared.records import described_run, write_record

UPDATES = 4
"""Of each process, the first of which does not count."""
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Size:
    """A model and a batch."""

    hidden: int
    layers: int
    vocabulary: int
    groups: int
    prompt: int
    """Mean tokens of a prompt; they vary by a quarter."""
    response: int
    """Longest response; their lengths are spread as in training, most of them short."""
    micro_batch: int
    """Most samples of a forward and backward pass."""


SIZES = {
    "small": Size(hidden=96, layers=2, vocabulary=96, groups=16, prompt=48, response=192, micro_batch=32),
    "small-long": Size(hidden=96, layers=2, vocabulary=96, groups=4, prompt=48, response=768, micro_batch=8),
    "medium": Size(hidden=256, layers=4, vocabulary=16_384, groups=4, prompt=192, response=192, micro_batch=8),
    "medium-long": Size(hidden=256, layers=4, vocabulary=16_384, groups=2, prompt=48, response=768, micro_batch=8),
    "large": Size(hidden=512, layers=8, vocabulary=65_536, groups=2, prompt=256, response=192, micro_batch=8),
}


def samples_of(size: Size) -> list[Sample]:
    """What both sides are given."""
    return draw_samples(size.groups, prompt=size.prompt, response=size.response, vocabulary=size.vocabulary)


def save_model(size: Size, folder: Path) -> None:
    """A random model, with a tokenizer that is never asked."""
    save_small_tokenizer(folder)
    torch.manual_seed(0)
    heads = max(2, size.hidden // 64)
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=size.hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


class Stopwatch:
    """Seconds and gradient norms of the updates, and the memory that they took beyond the imports.

    The processor's seconds say more than the clock's on a machine that others use too.
    """

    def __init__(self) -> None:
        self._base = psutil.Process().memory_info().rss
        self._began = self._began_cpu = 0.0
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.norms: list[float] = []

    def begin(self) -> None:
        """An update begins."""
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def end(self, norm: float) -> None:
        """It is done."""
        self.seconds.append(time.perf_counter() - self._began)
        self.cpu_seconds.append(time.process_time() - self._began_cpu)
        self.norms.append(norm)

    def report(self) -> dict[str, Any]:
        """What is printed."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "gradient_norms": self.norms,
            "memory_bytes": peak - self._base,
        }


def measure_ours(size: Size, folder: Path) -> dict[str, Any]:
    """Training steps by the learner, each on the same batch."""
    from rlhfless_functions.learning.batch import TrainingBatch
    from rlhfless_functions.learning.state import initial_state
    from rlhfless_functions.learning.step import train_step

    watch = Stopwatch()
    samples = samples_of(size)
    request = learn_request(
        folder,
        samples,
        response=size.response,
        microbatch_tokens=size.micro_batch * longest_sequence(samples, size.response),
        learning_rate=LEARNING_RATE,
        total_steps=UPDATES,
        model={"dtype": "float32"},
        learning={},
    )
    state = initial_state(request)
    prepared = prepared_samples(samples)
    for step in range(1, UPDATES + 1):
        watch.begin()
        report = train_step(state, TrainingBatch(prepared, request.algorithm, step), request, step, lambda: None)
        watch.end(report.policy.gradient_norms[0])
    return watch.report()


def measure_trl(size: Size, folder: Path) -> dict[str, Any]:
    """Updates by TRL's trainer: its loss on padded micro-batches, accumulated, and its optimizer's step."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    watch = Stopwatch()
    samples = samples_of(size)
    parts = -(-len(samples) // size.micro_batch)
    configuration = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=size.micro_batch,
        gradient_accumulation_steps=parts,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=size.response,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        learning_rate=LEARNING_RATE,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1e9,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    trainer = trl.GRPOTrainer(
        model=Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=configuration,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * size.groups}),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = parts
    model = trainer.model.train()
    optimizer = trainer.create_optimizer()
    prompts, prompt_mask = padded([sample.prompt_tokens for sample in samples], left=True)
    responses, response_mask = padded([sample.response_tokens for sample in samples], left=False)
    advantages = torch.tensor([sample.advantage for sample in samples])
    for _ in range(UPDATES):
        watch.begin()
        for start in range(0, len(samples), size.micro_batch):
            rows = slice(start, start + size.micro_batch)
            inputs = {
                "prompt_ids": prompts[rows],
                "prompt_mask": prompt_mask[rows],
                "completion_ids": responses[rows],
                "completion_mask": response_mask[rows],
                "advantages": advantages[rows],
                "num_items_in_batch": response_mask.sum(),
            }
            trainer.compute_loss(model, inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), configuration.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        watch.end(float(norm))
    return watch.report()


def padded(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [rows, longest]."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for number, row in enumerate(rows):
        where = slice(width - len(row), None) if left else slice(0, len(row))
        ids[number, where], mask[number, where] = torch.tensor(row), 1
    return ids, mask


SIDES = {"rlhfless": measure_ours, "trl": measure_trl}


def run_side(side: str, size: str, threads: int, folder: Path) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--sizes", size, "--threads", str(threads)]
    output = subprocess.run([*command, "--folder", str(folder)], stdout=subprocess.PIPE, check=True).stdout
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    return measured


def compare(name: str, rounds: int, threads: int) -> dict[str, Any]:
    """One size: both sides in turn."""
    size = SIZES[name]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        save_model(size, Path(folder))
        for _ in range(rounds):
            for side, measured in runs.items():
                measured.append(run_side(side, name, threads, Path(folder)))
    first = {side: measured[0]["gradient_norms"][0] for side, measured in runs.items()}
    if abs(first["rlhfless"] - first["trl"]) > 1e-3 * first["trl"]:
        raise SystemExit(f"{name}: the two sides do not take the same update: gradient norms {first}")
    samples = samples_of(size)
    tokens = sum(len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples)
    seconds, cpu_seconds = (
        {
            side: statistics.median(second for run in measured for second in run[kind][1:])
            for side, measured in runs.items()
        }
        for kind in ("seconds", "cpu_seconds")
    )
    memory = {side: statistics.median(run["memory_bytes"] for run in measured) for side, measured in runs.items()}
    return {
        "tokens": tokens,
        "samples": len(samples),
        "tokens_per_second": {side: tokens / taken for side, taken in seconds.items()},
        "memory_bytes": memory,
        "speed_ratio": seconds["trl"] / seconds["rlhfless"],
        "cpu_speed_ratio": cpu_seconds["trl"] / cpu_seconds["rlhfless"],
        "memory_ratio": memory["rlhfless"] / memory["trl"],
        "runs": runs,
    }


def main() -> None:
    """Measure, print and keep the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(SIZES), help=", ".join(SIZES))
    parser.add_argument("--rounds", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](SIZES[arguments.sizes], arguments.folder)))
        return
    result = {
        "sizes": {name: compare(name, arguments.rounds, arguments.threads) for name in arguments.sizes.split(",")},
        "threads": arguments.threads,
        **described_run(("torch", "transformers", "trl")),
    }
    print(json.dumps(result, indent=2))
    write_record(result, arguments.json)


if __name__ == "__main__":
    main()
