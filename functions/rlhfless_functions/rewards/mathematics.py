"""Mathematical equality, by the library made for it: https://github.com/huggingface/Math-Verify."""

import logging
from typing import Any

from math_verify import parse, verify

from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.checks import check_each
from rlhfless_functions.rewards.groups import RewardGroup

_TRUTH_SECONDS = 5
"""Time limit for parsing the ground truth, in seconds."""


def math_scorer(require_end: bool = False, seconds: float = 5.0) -> Scorer:
    """Score 1 if the response's last mathematical expression (`\\boxed{}` first) equals the ground truth, else 0.

    Args:
        require_end: score 0 if the response was truncated.
        seconds: CPU time to parse and compare one response; above it the response scores 0.
    """
    # A response that can't be parsed is an ordinary wrong answer and needs no log line.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # Import here, before the forks.
    verify(parse(r"$\frac{1}{2}$"), parse("0.5"))

    def score(group: RewardGroup, call: Call) -> list[float]:
        truth = _expressions(str(group.ground_truth).strip())
        if not truth:
            raise LookupError(f"the ground truth {group.ground_truth!r} of row {group.prompt} is not mathematics")

        def check(number: int) -> float:
            return float(any(_equal(truth, answer) for answer in _answers(group.completions[number])))

        ended = group.ended() if require_end else list(range(group.size))
        scores = check_each(check, ended, seconds, call)
        return [scores.get(number, 0.0) for number in range(group.size)]

    return score


def _equal(truth: list[Any], answer: str) -> bool:
    # The library's own limits use alarms, which do not interrupt the arithmetic of large numbers.
    return bool(verify(truth, parse(answer, parsing_timeout=0), timeout_seconds=0))


def _answers(completion: str) -> list[str]:
    """Return the response and, if it has several boxes, the last box alone, because the parser reads several as one
    set."""
    last = completion.rfind("\\boxed")
    return [completion, completion[last:]] if completion.count("\\boxed") > 1 else [completion]


def _expressions(truth: str) -> list[Any]:
    """Return the parsed ground truth. Data often gives it as bare LaTeX, without the `$` that the parser expects."""
    bare = "\\" in truth and "$" not in truth and "\\boxed" not in truth and "\\(" not in truth and "\\[" not in truth
    parsed: list[Any] = parse(f"${truth}$" if bare else truth, parsing_timeout=_TRUTH_SECONDS)
    return parsed or parse(f"${truth}$", parsing_timeout=_TRUTH_SECONDS)
