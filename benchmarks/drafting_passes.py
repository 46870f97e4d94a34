"""What a decode pass of the transformers engine takes by its sequences and its drafted rows, in CPU seconds.

    python benchmarks/drafting_passes.py [--model examples/quickstart/model] [--passes 40] [--json FILE]

Every set-up verifies drafts that are wrong, so that the batch stays as it is. The set-ups take turns, a pass each, on
one thread, and the median of each counts. From these costs follows what drafting can bring at each size of batch
(`--acceptance`: the chance that a drafted token behind right ones is right): for which row cost it would take 0.75 of
the time, and where it pays as things are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe_machine

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.drafting.drafter import Drafts, PassTiming
from rlhfless_functions.generation.drafting.index import Integers
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.continuous_batch import ContinuousBatch
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.settings import ModelSettings, SamplingSettings

ROOT = Path(__file__).parents[1]
BATCHES = (1, 4, 8, 16, 32, 64, 128)
DRAFTS = (0, 1, 2, 4, 8, 15)
"""Drafted tokens a sequence."""
PROMPT_TOKENS, RESPONSE_TOKENS = 40, 224
WARM_UP = 4
MOST_ROWS = 640


class FixedDrafts:
    """Proposes as many tokens for each sequence in each pass, hardly any of which is right."""

    def __init__(self, each: int) -> None:
        self._each = each

    def on(self, sequences: int) -> bool:
        return self._each > 0

    def propose(
        self,
        active: Integers,
        remaining: Integers,
        tokens_of: Callable[[int], Any],
        rows: int,
        padded: Callable[[int], int],
        most: int,
    ) -> Drafts:
        offsets = np.tile(np.arange(1, self._each + 1), len(active))
        return Drafts(np.repeat(active, self._each), offsets, np.full(len(offsets), 2))

    def sampled(
        self, active: Integers, counts: Integers, tokens: Integers, drafts: Drafts | None, timing: PassTiming
    ) -> None:
        """Nothing is learnt."""

    def released(self, slots: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """Nothing is kept."""

    def moved(self, sources: Integers, slots: Integers) -> None:
        """Nothing is kept."""


def open_run(model: Path, sequences: int, each: int) -> ContinuousBatch:
    """A run of its own engine, as a cache belongs to one run at a time. Nothing ends it before its time."""
    engine = TransformersEngine()
    settings = ModelSettings(source=str(model), dtype="float32")
    engine.load(settings, WeightsReference(version=0, uri=str(model)))
    sampling = SamplingSettings(max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=RESPONSE_TOKENS)
    random = np.random.default_rng(0)
    prompts = random.integers(3, 60, (max(1, sequences // 8), PROMPT_TOKENS)).tolist()
    tasks = [SequenceTask(row // 8, row % 8, prompts[row // 8], row + 1) for row in range(sequences)]
    run = engine.start(tasks, sampling, None, [])
    run._eos[:] = False
    run._drafter = FixedDrafts(each)  # type: ignore[assignment]
    return run


def measure(model: Path, passes: int) -> list[dict[str, float]]:
    """CPU seconds of a pass of each set-up."""
    torch.set_num_threads(1)
    shapes = [(batch, each) for batch in BATCHES for each in DRAFTS if batch * (1 + each) <= MOST_ROWS]
    runs = {shape: open_run(model, *shape) for shape in shapes}
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for number in range(WARM_UP + passes):
        for shape, run in runs.items():
            began = time.process_time()
            run.step()
            took = time.process_time() - began
            if number >= WARM_UP:
                seconds[shape].append(took)
    return [
        {"sequences": batch, "drafts": each, "seconds": statistics.median(seconds[batch, each])}
        for batch, each in shapes
    ]


def gains(rows: Sequence[dict[str, float]], acceptance: float) -> list[dict[str, float]]:
    """What drafting brings at each size of batch, where every sequence has a draft at every pass.

    Args:
        acceptance: chance that a drafted token behind right ones is right.
    """
    found = []
    for batch in BATCHES:
        by_drafts = {int(row["drafts"]): row["seconds"] for row in rows if row["sequences"] == batch}
        a_token = {each: took / tokens_a_pass(each, acceptance) for each, took in by_drafts.items()}
        best = min(a_token, key=lambda each: a_token[each])
        slope = (by_drafts[max(by_drafts)] - by_drafts[0]) / (batch * max(by_drafts))
        found.append(
            {
                "sequences": batch,
                "pass_seconds": by_drafts[0],
                "row_of_a_pass": slope / by_drafts[0],
                "best_drafts": best,
                "seconds_a_token_against_none": a_token[best] / a_token[0],
                "row_of_a_pass_for_0.75": row_cost_for(0.75, batch, acceptance),
            }
        )
    return found


def tokens_a_pass(drafts: int, acceptance: float) -> float:
    """1 and what of the drafts is right on average."""
    return sum(acceptance**number for number in range(drafts + 1))


def row_cost_for(ratio: float, batch: int, acceptance: float) -> float:
    """What a drafted row may take, as a share of a pass without drafts, for drafting to take `ratio` of the time a
    token: the most over all numbers of drafts; below 0 where no row cost is low enough."""
    return max((ratio * tokens_a_pass(each, acceptance) - 1) / (batch * each) for each in range(1, max(DRAFTS) + 1))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "quickstart" / "model")
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.5, 0.7, 0.9])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.model, arguments.passes)
    result = {
        "command": " ".join(["python", *sys.argv]),
        **describe_machine(["torch", "transformers"]),
        "passes": rows,
        "gains": {f"{each:g}": gains(rows, each) for each in arguments.acceptance},
    }
    text = json.dumps(result, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
