"""Verdicts of `math`, math-verify, TRL, verl and open-r1: the tables of docs/research/mathematics.md.

    python benchmarks/peers/mathematics.py --verl verl-0.9.1-py3-none-any.whl

The pairs of a ground truth and a response are those of tests/rewards/mathematics/pairs.jsonl. Each judge is asked
for its score, and for what it compared, which explains the score. verl's function for MATH is taken out of its wheel
(`pip download verl --no-deps`); open-r1's is its call of math-verify, repeated here.
"""

from __future__ import annotations

import argparse
import json
import logging
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from trl.rewards import accuracy_reward

from benchmarks.shared.pages import replace_between
from benchmarks.shared.places import REPOSITORY
from rlhfless_functions.rewards.mathematics.scorer import is_right
from rlhfless_functions.rewards.mathematics.truths import readings_of

PAGE = REPOSITORY / "docs" / "research" / "mathematics.md"
PAIRS = REPOSITORY / "tests" / "rewards" / "mathematics" / "pairs.jsonl"


@dataclass(frozen=True)
class Verdict:
    """A judge's score; None if it skips the truth, as one that it can't read."""

    score: float | None
    compared: str
    """The two sides as the judge read them."""


Judge = Callable[[str, str], Verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, required=True, help="a wheel of verl")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    judges: dict[str, Judge] = {
        f"math-verify {version('math-verify')}": by_math_verify,
        "the same, $truth$": lambda truth, response: by_math_verify(marked(truth), response),
        f"TRL {version('trl')}": by_trl,
        f"verl {arguments.verl.name.split('-')[1]}": by_verl(arguments.verl),
        "open-r1, $truth$": lambda truth, response: by_open_r1(marked(truth), response),
    }
    pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    for pair in pairs:
        pair["ours"] = float(is_right(readings_of(pair["truth"]), pair["response"]))
        pair["verdicts"] = [judge(as_text(pair["truth"]), pair["response"]) for judge in judges.values()]
    replace_between(PAGE, "kinds", by_kind(pairs, list(judges)))
    replace_between(PAGE, "pairs", differences(pairs, list(judges)))
    print(by_kind(pairs, list(judges)))


def as_text(truth: Any) -> str:
    """Return a truth as the text that its column would hold."""
    return truth if isinstance(truth, str) else str(truth)


def marked(truth: str) -> str:
    """Return a truth as LaTeX between `$`, which these two find; a truth that marks its answer stays as it is."""
    marks = ("$", "\\boxed", "####", "\n", "answer")
    return truth if any(mark in truth for mark in marks) else f"${truth}$"


def by_math_verify(truth: str, response: str) -> Verdict:
    """math-verify with its defaults, which its README shows."""
    gold, answer = parse(truth), parse(response)
    return Verdict(float(verify(gold, answer)) if gold else None, f"{shown(gold)} with {shown(answer)}")


def by_trl(truth: str, response: str) -> Verdict:
    """TRL's `accuracy_reward`, and what it logs of its reading."""
    logged: dict[str, list[str]] = {}
    score = accuracy_reward([[{"content": response}]], [truth], log_extra=logged.__setitem__)[0]
    gold, answer = logged["gold_parsed"][0], logged["answer_parsed"][0]
    return Verdict(score, f"{gold.split(', ')[0].strip('[]') if gold[0] == '[' else gold} with {answer}"[:90])


def by_open_r1(truth: str, response: str) -> Verdict:
    """open-r1's `accuracy_reward`."""
    gold = parse(truth, extraction_mode="first_match", extraction_config=[LatexExtractionConfig()])
    form = NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, equations=True, boxed="all", units=True
    )
    way = LatexExtractionConfig(normalization_config=form, boxed_match_priority=0, try_extract_without_anchor=False)
    answer = parse(response, extraction_config=[way], extraction_mode="first_match")
    return Verdict(float(verify(gold, answer)) if gold else None, f"{shown(gold)} with {shown(answer)}")


def by_verl(wheel: Path) -> Judge:
    """verl's score of MATH: the last box's text, compared as text after its normalization."""
    module = ModuleType("verl_math")
    with zipfile.ZipFile(wheel) as file:
        exec(file.read("verl/utils/reward_score/math_reward.py"), module.__dict__)

    def judge(truth: str, response: str) -> Verdict:
        boxed = module.last_boxed_only_string(response)
        if boxed is None:
            return Verdict(module.compute_score(response, truth), "no closed box")
        try:
            sides = [module.strip_string(text) for text in (truth, module.remove_boxed(boxed))]
        except Exception as error:
            return Verdict(module.compute_score(response, truth), f"error: {error!r}")
        return Verdict(module.compute_score(response, truth), " with ".join(sides))

    return judge


def shown(parsed: Sequence[Any]) -> str:
    """Return the object that math-verify compares first."""
    return str(parsed[0]) if parsed else "nothing"


def by_kind(pairs: list[dict[str, Any]], judges: list[str]) -> str:
    """Markdown of the right verdicts by kind: those that the pair's `score` has."""
    lines = [f"| Kind | Pairs | Ours | {' | '.join(judges)} |", "|---|---|---|" + "---|" * len(judges)]
    groups = [(kind, list(each)) for kind, each in groupby(pairs, key=lambda pair: pair["kind"])]
    for kind, group in [*groups, ("all", pairs)]:
        ours = sum(pair["ours"] == pair["score"] for pair in group)
        right = [sum(pair["verdicts"][at].score == pair["score"] for pair in group) for at in range(len(judges))]
        lines.append(f"| {kind} | {len(group)} | {ours} | {' | '.join(map(str, right))} |")
    for title, given in (("1 for a wrong answer", 1.0), ("0 for a right answer", 0.0), ("skipped", None)):
        counts = Counter(
            at
            for pair in pairs
            for at, verdict in enumerate(pair["verdicts"])
            if verdict.score == given and verdict.score != pair["score"]
        )
        ours = sum(pair["ours"] == given != pair["score"] for pair in pairs)
        lines.append(f"| *{title}* | | {ours} | {' | '.join(str(counts[at]) for at in range(len(judges)))} |")
    return "\n".join([*lines, ""])


def differences(pairs: list[dict[str, Any]], judges: list[str]) -> str:
    """Markdown of every pair, by kind; where a judge differs from us, what it compared."""
    names = [
        "m-v" if "math" in judge else "m-v $" if "same" in judge else judge.split()[0].strip(",") for judge in judges
    ]
    lines = []
    for kind, group in groupby(pairs, key=lambda pair: pair["kind"]):
        lines += [f"### {kind[0].upper()}{kind[1:]}", ""]
        lines += [f"| Truth | Response | Ours | {' | '.join(names)} | What the others compared, where they differ |"]
        lines += ["|---|---|---|" + "---|" * (len(names) + 1)]
        for pair in group:
            verdicts: list[Verdict] = pair["verdicts"]
            reasons: dict[str, list[str]] = {}
            for name, verdict in zip(names, verdicts, strict=True):
                if verdict.score != pair["ours"]:
                    reasons.setdefault(verdict.compared, []).append(name)
            why = "; ".join(f"{', '.join(who)}: {code(what)}" for what, who in reasons.items())
            scores = " | ".join("–" if each.score is None else f"{each.score:g}" for each in verdicts)
            truth, response = code(as_text(pair["truth"])), code(pair["response"])
            lines.append(f"| {truth} | {response} | {pair['ours']:g} | {scores} | {why} |")
        lines.append("")
    return "\n".join(lines)


def code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    text = text.replace("\n", " ⏎ ").replace("|", "\\|").replace("`", "'")
    return f"`{text if len(text) <= 90 else f'{text[:87]}…'}`"


if __name__ == "__main__":
    main()
