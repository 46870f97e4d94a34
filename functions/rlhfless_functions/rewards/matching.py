"""Verifiers that compare text: equality with the ground truth, and a regular expression's match."""

import re

from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.checks import check_each
from rlhfless_functions.rewards.groups import RewardGroup


def exact_match_scorer(pattern: str | None, require_end: bool, seconds: float = 1.0) -> Scorer:
    """Score 1 if the answer equals the ground truth, else 0.

    Args:
        pattern: regular expression whose last match's first group (or whole match, if it has none) is the answer; the
            whole response if None. Both sides are stripped.
        require_end: score 0 if the response was truncated.
        seconds: CPU time to search one response; above it the response scores 0.
    """
    compiled = None if pattern is None else re.compile(pattern, re.DOTALL)

    def score(group: RewardGroup, call: Call) -> list[float]:
        truth = str(group.ground_truth).strip()

        def check(number: int) -> float:
            answer = _last_match(compiled, group.completions[number])
            return float(answer is not None and answer.strip() == truth)

        ended = group.ended() if require_end else list(range(group.size))
        if compiled is None:
            scores = {number: check(number) for number in ended}
        else:
            scores = check_each(check, ended, seconds, call)
        return [scores.get(number, 0.0) for number in range(group.size)]

    return score


def format_scorer(pattern: str, seconds: float = 1.0) -> Scorer:
    """Score 1 if the whole response matches the pattern, else 0; `.` matches newlines too.

    Args:
        pattern: regular expression.
        seconds: CPU time to match one response; above it the response scores 0.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def score(group: RewardGroup, call: Call) -> list[float]:
        def check(number: int) -> float:
            return float(compiled.fullmatch(group.completions[number]) is not None)

        return list(check_each(check, range(group.size), seconds, call).values())

    return score


def _last_match(pattern: re.Pattern[str] | None, text: str) -> str | None:
    if pattern is None:
        return text
    last = None
    for last in pattern.finditer(text):  # noqa: B007 - the last match is wanted
        pass
    return None if last is None else last[1] if pattern.groups else last[0]
