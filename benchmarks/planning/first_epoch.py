"""Saving of GPU-seconds in a first epoch, by how much prompts' lengths say of their responses' lengths.

    python benchmarks/planning/first_epoch.py [SCENARIO ...] [--seeds 5]

Each trace keeps its lengths. Only who has which prompt length changes, so that their ranks correlate by about 0, 0.3,
0.6 or 0.9 with those of the responses' means. `told` knows every length beforehand.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.planner.lengths import rank_correlation
from rlhfless_operator.simulator.policies import COMPLETE, POLICIES, find_policy
from rlhfless_operator.simulator.scenarios import SCENARIOS, Scenario, find_scenario
from rlhfless_operator.simulator.steps import run_policy
from rlhfless_operator.simulator.traces import Trace

CORRELATIONS = (0.0, 0.3, 0.6, 0.9)


def correlated(trace: Trace, correlation: float, seed: int) -> Trace:
    """Return the trace with its prompts' lengths dealt out anew."""
    level = np.log(np.maximum(trace.response_tokens[0], 1)).mean(axis=1)
    level = (level - level.mean()) / level.std()
    noise = np.random.default_rng([seed, 1]).normal(0, 1, trace.prompts)
    order = np.argsort(correlation * level + np.sqrt(1 - correlation**2) * noise)
    tokens = np.empty_like(trace.prompt_tokens)
    tokens[order] = np.sort(trace.prompt_tokens)
    return replace(trace, prompt_tokens=tokens)


def measure(scenario: Scenario, seeds: range) -> Iterator[dict[str, Any]]:
    """Yield the first epoch's means of static GPUs, and of ours by what is known of lengths."""
    ours = find_policy(COMPLETE)
    cases = [
        ("static", POLICIES["static"], 0.0),
        *((f"correlation {share:g}", ours, share) for share in CORRELATIONS),
        ("told", replace(ours, told=frozenset({"migration", "division"})), 0.0),
    ]
    for name, settings, share in cases:
        steps, ranks = [], []
        for seed in seeds:
            trace = correlated(first_epoch_of(scenario.draw_trace(seed)), share, seed)
            steps += run_policy(scenario, settings, trace, seed)
            means = trace.response_tokens[0].mean(axis=1)
            ranks.append(rank_correlation(trace.prompt_tokens.astype(float), means) or 0.0)
        found = [step.rank_correlation for step in steps if step.rank_correlation is not None]
        yield {
            "case": name,
            "seconds": round(fmean(step.seconds for step in steps), 2),
            "gpu_seconds": round(fmean(step.gpu_seconds for step in steps), 1),
            "prompts_rank_correlation": round(fmean(ranks), 2),
            "predictions_rank_correlation": round(fmean(found), 2) if found else None,
        }


def first_epoch_of(trace: Trace) -> Trace:
    """Return the trace's first epoch."""
    return replace(trace, response_tokens=trace.response_tokens[:1])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", choices=[*SCENARIOS, []], default=list(SCENARIOS)[:1])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    given = parser.parse_args()
    result: dict[str, Any] = {**described_run(["numpy"]), "seeds": given.seeds, "scenarios": {}}
    for name in given.scenarios:
        cases = result["scenarios"][name] = list(measure(find_scenario(name), range(given.seeds)))
        for case in cases:
            print(name, json.dumps(case), file=sys.stderr, flush=True)
    print(json.dumps(result, indent=2))
    write_record(result, given.output)


if __name__ == "__main__":
    main()
