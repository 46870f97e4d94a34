"""Static actors and ours with drafts and without, simulated at acceptances that were measured and published ones.

    python benchmarks/drafting/policies.py [--seeds 3] [--json FILE]

Each row is a scenario, an acceptance and a weight of cost against time, beside static actors without drafts and with
them. Tables go into docs/research/drafting.md (`--no-page` leaves it as it is).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shared.pages import replace_between
from benchmarks.shared.places import BENCHMARKS, REPOSITORY
from benchmarks.shared.records import described_run, write_record
from rlhfless_operator.planner.latency.drafting import DraftedLatency, Drafts
from rlhfless_operator.simulator.policies import COMPLETE, POLICIES, find_policy
from rlhfless_operator.simulator.scenarios import SCENARIOS, Scenario
from rlhfless_operator.simulator.simulate import simulate_variants

BEST, TAILS = "paper-3b-gsm8k-grpo", "h100-1024-70b-32k"
WEIGHTS = (0.5, 0.7, 0.85)
"""Of cost against time, for ours."""


@dataclass(frozen=True)
class Acceptance:
    """How well tokens are drafted, and who says so."""

    name: str
    drafts: Drafts
    source: str


ACCEPTANCES = (
    Acceptance(
        "quickstart, step 9",
        Drafts(0.505, 0.873),
        "measured: 4.07 tokens a pass with sixteen drafts, 38 % of them kept; the first step of the second epoch",
    ),
    Acceptance(
        "quickstart, same weights, untrained",
        Drafts(1.0, 0.742),
        "measured offline: 3.85 tokens a pass with sixteen drafts from earlier responses of the same prompt",
    ),
    Acceptance(
        "quickstart, same weights, trained",
        Drafts(1.0, 0.912),
        "measured offline: 8.99 tokens a pass with sixteen drafts from earlier responses of the same prompt",
    ),
    Acceptance(
        "vLLM suffix", Drafts(1.0, 0.62), "published: 62 % of single drafts accepted on MT-Bench (vLLM PR 24852)"
    ),
    Acceptance(
        "DAS",
        Drafts(1.0, 0.5),
        "published: rollouts take half of the time at best (arXiv 2511.13841), so at least 2 tokens a pass",
    ),
    Acceptance(
        "SpecRL",
        Drafts(1.0, 0.524),
        "published: rollouts up to 2.1 times as fast (verl PR 4535), so at least 2.1 tokens a pass",
    ),
    Acceptance(
        "EAGLE-3 in NeMo-RL",
        Drafts(1.0, 0.46, longest=3),
        "published: generation takes 56.6 s for 100 s with three drafts (arXiv 2604.26779), so at least 1.77 tokens a"
        " pass; what its draft model takes is part of that, and not of this",
    ),
)


def compare(
    scenario: Scenario, acceptance: Acceptance, seeds: Sequence[int], weights: Sequence[float]
) -> dict[str, Any]:
    """Static actors without drafts and with them, the paper's policy and ours with them, and ours without."""
    drafting = replace(scenario, drafts=acceptance.drafts)
    static = replace(POLICIES["static"], drafts=False)
    variants = {"static": static, "static, drafts": POLICIES["static"], "paper, drafts": POLICIES["paper"]}
    rows = simulate_variants(drafting, seeds, variants)["policies"]
    for weight in weights:
        ours = {f"rlhfless, λ = {weight:g}, drafts": find_policy(COMPLETE)}
        if weight == weights[0]:
            ours = {f"rlhfless, λ = {weight:g}": replace(find_policy(COMPLETE), drafts=False), **ours}
        rows += simulate_variants(replace(drafting, cost_weight=weight), seeds, ours)["policies"]
    plain = drafting.profile(drafts=False).latency.lines[0]
    latency = DraftedLatency(plain, acceptance.drafts)
    a_pass = {
        batch: latency.tokens[latency.lines.index(latency.at(batch, 400))] for batch in (1, 16, scenario.max_batch)
    }
    return {
        "scenario": scenario.name,
        "acceptance": acceptance.name,
        "coverage": acceptance.drafts.coverage,
        "chance": acceptance.drafts.acceptance,
        "source": acceptance.source,
        "tokens_a_pass": a_pass,
        "policies": rows,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown, one table a scenario."""
    lines: list[str] = []
    for scenario in dict.fromkeys(each["scenario"] for each in results):
        lines += [
            "",
            f"`{scenario}`:",
            "",
            "| drafts of | tokens a pass, 1 / 16 / 256 sequences | policy | seconds | GPU-seconds | of the bound |"
            " beside static without drafts | beside static with |",
            "|---|---|---|--:|--:|--:|--:|--:|",
        ]
        for each in (each for each in results if each["scenario"] == scenario):
            plain, drafted, *_ = each["policies"]
            head = f"{each['acceptance']} | {' / '.join(f'{value:.1f}' for value in each['tokens_a_pass'].values())}"
            for row in each["policies"]:
                lines.append(
                    f"| {head} | {row['policy']} | {row['seconds']:.1f} | {row['gpu_seconds']:,.0f} |"
                    f" {row['lower_bound_share']:.0%} | {_beside(row, plain)} | {_beside(row, drafted)} |"
                )
                head = " | "
    return "\n".join(lines) + "\n"


def _beside(row: dict[str, float], other: dict[str, float]) -> str:
    saved = 1 - row["gpu_seconds"] / other["gpu_seconds"]
    return f"{other['seconds'] / row['seconds']:.2f}×, {saved:.0%}".replace("-0%", "0%")


def main() -> None:
    """Run, print, keep, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path, default=BENCHMARKS / "drafting" / "results" / "drafting_policies.json")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs" / "research" / "drafting.md")
    parser.add_argument("--no-page", dest="page", action="store_const", const=None, help="write no tables into a page")
    arguments = parser.parse_args()
    results = [compare(SCENARIOS[BEST], each, range(arguments.seeds), WEIGHTS) for each in ACCEPTANCES]
    # A step there has 4,096 responses of up to 32,768 tokens: one seed.
    results += [compare(SCENARIOS[TAILS], each, [0], WEIGHTS[:1]) for each in (ACCEPTANCES[0], ACCEPTANCES[4])]
    write_record({**described_run(["numpy"]), "results": results}, arguments.json)
    text = table(results)
    print(text)
    if arguments.page is not None:
        replace_between(arguments.page, "policies", text)


if __name__ == "__main__":
    main()
