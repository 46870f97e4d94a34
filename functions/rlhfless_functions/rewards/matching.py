"""Verifiers that compare text: equality with the ground truth, and a regular expression's match."""

import re

from rlhfless_functions.data.thoughts import begun_thoughts
from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.checks import check_each
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.thoughts import answer_span
from rlhfless_functions.rewards.truths import UnreadableTruthError, accepted


def exact_match_scorer(pattern: str | None, require_end: bool, seconds: float = 1.0) -> Scorer:
    """Score 1 if the answer equals the ground truth, else 0.

    A number that is a float, a truth value, a list or a dict is right as `truths.accepted` says.

    Args:
        pattern: regular expression whose last match's first group (or whole match, if it has none) is the answer, if
            it follows the thoughts; the whole response after its thoughts if None. Both sides are stripped.
        require_end: score 0 if the response was truncated.
        seconds: CPU time to search one response; above it the response scores 0.
    """
    compiled = None if pattern is None else re.compile(pattern, re.DOTALL)

    def score(group: RewardGroup, call: Call) -> list[float]:
        try:
            truths = accepted(group.ground_truth)
        except UnreadableTruthError as error:
            raise LookupError(f"the ground truth {group.ground_truth!r:.80} of row {group.prompt} {error}") from None

        def check(number: int) -> float:
            answer = _answer(compiled, group.completions[number], group.text)
            return float(answer is not None and answer.strip() in truths)

        ended = group.ended() if require_end else list(range(group.size))
        if compiled is None:
            scores = {number: check(number) for number in ended}
        else:
            scores = check_each(check, ended, seconds, call)
        return [scores.get(number, 0.0) for number in range(group.size)]

    return score


def format_scorer(pattern: str, seconds: float = 1.0) -> Scorer:
    """Score 1 if the whole response matches the pattern, else 0; `.` matches newlines too.

    If the prompt begins the thoughts (`<think>` at its end), the answer as a whole is the tag with the response after
    it: either it or the response alone may match. A response that begins the thoughts again does not count.

    Args:
        pattern: regular expression.
        seconds: CPU time to match one response; above it the response scores 0.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def score(group: RewardGroup, call: Call) -> list[float]:
        begun = begun_thoughts(group.text)

        def check(number: int) -> float:
            response = group.completions[number]
            if not begun:
                return float(compiled.fullmatch(response) is not None)
            if response.lstrip().startswith(begun.strip()):
                return 0.0
            return float(any(compiled.fullmatch(text) is not None for text in (begun + response, response)))

        return list(check_each(check, range(group.size), seconds, call).values())

    return score


def _answer(pattern: re.Pattern[str] | None, response: str, prompt: str) -> str | None:
    span = answer_span(response, prompt)
    if span is None:
        return None
    start, end = span
    if pattern is None:
        return response[start:end]
    group = 1 if pattern.groups else 0
    begun = begun_thoughts(prompt)
    whole, start, end = begun + response, start + len(begun), end + len(begun)
    # A match that begins in the thoughts may hide one after them.
    matches = [*pattern.finditer(whole), *pattern.finditer(whole, start)]
    after = [found for found in matches if start <= found.start(group) and found.end(group) <= end]
    return max(after, key=lambda found: found.start(group))[group] if after else None
