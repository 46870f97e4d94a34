"""CPU seconds of a decode pass of the transformers engine, by its sequences and its drafted rows.

    python benchmarks/drafting/passes.py measure [--model examples/quickstart/model] [--passes 40] [--json FILE]
    python benchmarks/drafting/passes.py gains [--passes FILE] [--steps FILE]

Every set-up verifies wrong drafts, which leave the batch unchanged. The set-ups take turns on one thread, a pass each,
and the median of each counts. `gains` computes what drafting can save in a step, from these costs and from the drafts
and batches that `drafting/steps.py` measured: the batches at which it is faster, and the row cost at which it would
take 0.75 of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shared.places import BENCHMARKS, QUICKSTART
from benchmarks.shared.records import described_run, write_record
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.drafting.drafter import Drafts, PassTiming
from rlhfless_functions.generation.drafting.index import Integers
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.continuous_batch import ContinuousBatch
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.settings import ModelSettings, SamplingSettings

RESULTS = BENCHMARKS / "drafting" / "results"
BATCHES = (1, 4, 8, 16, 32, 64, 128)
DRAFTS = (0, 1, 2, 4, 8, 15)
"""Drafted tokens a sequence."""
PROMPT_TOKENS, RESPONSE_TOKENS = 40, 224
WARM_UP = 4
GOAL = 0.75
"""Of the time without drafts: what drafting is to reach."""
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


def ratio(by_drafts: Mapping[int, float], drafts: Drafted, scale: float = 1.0) -> tuple[float, int]:
    """The least time a token with drafts, over that without, and how many drafts that takes.

    Args:
        by_drafts: seconds of a pass by the drafted tokens of each sequence.
        drafts: how often there is something to draft, and how often it is right.
        scale: what drafted rows take, as a multiple of what they took.
    """
    plain = by_drafts[0]
    found = {
        each: (plain + scale * drafts.coverage * (seconds - plain)) / drafts.tokens(each) / plain
        for each, seconds in by_drafts.items()
    }
    best = min(found, key=lambda each: found[each])
    return found[best], best


@dataclass(frozen=True)
class Drafted:
    """What was measured of drafts."""

    coverage: float
    acceptance: float

    def tokens(self, each: int) -> float:
        """Tokens a pass with so many drafts."""
        return 1 + self.coverage * sum(self.acceptance**number for number in range(1, each + 1))


def gains(rows: Sequence[dict[str, float]], step: Mapping[str, Any]) -> dict[str, Any]:
    """What drafting can bring a step by these costs, if every sequence drafts as many tokens as are best on average.

    Args:
        rows: of `measure`.
        step: of benchmarks/drafting/steps.py: what its passes took without drafts, by batch, and how drafts fared.
    """
    drafts = Drafted(step["coverage"], step["acceptance"])
    costs = {batch: {int(r["drafts"]): r["seconds"] for r in rows if r["sequences"] == batch} for batch in BATCHES}
    shares = {
        int(least): part["seconds"] / step["never"]["seconds"] for least, part in step["never"]["by_batch"].items()
    }
    nearest = {least: min(BATCHES, key=lambda batch: abs(math.log(batch / (1.4 * least)))) for least in shares}

    def whole(scale: float, most: int = max(BATCHES)) -> float:
        """Of the step's time, if only passes of so many sequences draft."""
        return sum(
            share * (ratio(costs[nearest[least]], drafts, scale)[0] if least <= most else 1.0)
            for least, share in shares.items()
        )

    scales = [number / 100 for number in range(101)]
    enough = [scale for scale in scales if whole(scale) <= GOAL]
    return {
        "step": step["step"],
        "coverage": drafts.coverage,
        "acceptance": drafts.acceptance,
        "share_of_time_by_batch": shares,
        "by_batch": {
            str(batch): dict(zip(("ratio", "drafts"), ratio(costs[batch], drafts), strict=True)) for batch in BATCHES
        },
        "whole_step": whole(1.0),
        "only_batches_up_to": {str(most): whole(1.0, most) for most in BATCHES},
        "measured": step["cpu_against_never"],
        "row_cost_for_0.75": max(enough) if enough else None,
        "whole_step_if_rows_cost_nothing": whole(0.0),
    }


def main() -> None:
    """Measure, or work out what follows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--model", type=Path, default=QUICKSTART / "model")
    measuring.add_argument("--passes", type=int, default=40)
    measuring.add_argument("--json", type=Path, default=RESULTS / "drafting_passes.json")
    following = commands.add_parser("gains")
    following.add_argument("--passes", type=Path, default=RESULTS / "drafting_passes.json")
    following.add_argument("--steps", type=Path, default=RESULTS / "drafting_steps.json")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        rows = measure(arguments.model, arguments.passes)
        write_record({**described_run(["torch", "transformers"]), "passes": rows}, arguments.json)
    else:
        rows = json.loads(arguments.passes.read_text())["passes"]
        for step in json.loads(arguments.steps.read_text())["steps"]:
            print(json.dumps(gains(rows, step)))


if __name__ == "__main__":
    main()
