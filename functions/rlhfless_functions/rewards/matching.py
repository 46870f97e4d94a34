"""Verifiers that compare text: equality with the ground truth, and a regular expression's match."""

import re

from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.groups import RewardGroup


def exact_match_scorer(pattern: str | None, require_end: bool) -> Scorer:
    """1 where the answer equals the ground truth, else 0.

    Args:
        pattern: regular expression whose last match's first group (or whole match, if it has none) is the answer;
            the whole response if None. Both sides are stripped.
        require_end: score 0 where the response was truncated.
    """
    compiled = None if pattern is None else re.compile(pattern, re.DOTALL)

    def score(group: RewardGroup, call: Call) -> list[float]:
        truth = str(group.ground_truth).strip()
        return [
            float(
                (not require_end or reason != "truncated")
                and (answer := _last_match(compiled, completion)) is not None
                and answer.strip() == truth
            )
            for completion, reason in zip(group.completions, group.finish_reasons, strict=True)
        ]

    return score


def format_scorer(pattern: str) -> Scorer:
    """1 where the whole response matches the pattern, else 0; `.` matches newlines too."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(group: RewardGroup, call: Call) -> list[float]:
        return [float(compiled.fullmatch(completion) is not None) for completion in group.completions]

    return score


def _last_match(pattern: re.Pattern[str] | None, text: str) -> str | None:
    if pattern is None:
        return text
    last = None
    for last in pattern.finditer(text):  # noqa: B007 - the last match is wanted
        pass
    return None if last is None else last[1] if pattern.groups else last[0]
