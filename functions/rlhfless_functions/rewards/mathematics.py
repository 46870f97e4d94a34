"""Mathematical equality, by the library made for it: https://github.com/huggingface/Math-Verify."""

import logging
from typing import Any

from math_verify import parse, verify

from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.checks import check_each
from rlhfless_functions.rewards.groups import RewardGroup

_TRUTH_SECONDS = 5
"""Time that the ground truth may take to parse."""


def math_scorer(require_end: bool = False, seconds: float = 5.0) -> Scorer:
    """1 where the response's last mathematical expression (`\\boxed{}` first) equals the ground truth, else 0.

    Args:
        require_end: score 0 where the response was truncated.
        seconds: processor time that one response may take to parse and compare; past it the response scores 0.
    """
    # A response that cannot be parsed is an ordinary wrong answer, not news.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # What this imports on the way, no fork has to import again.
    verify(parse(r"$\frac{1}{2}$"), parse("0.5"))

    def score(group: RewardGroup, call: Call) -> list[float]:
        truth = _expressions(str(group.ground_truth).strip())
        if not truth:
            raise LookupError(f"the ground truth {group.ground_truth!r} of row {group.prompt} is no mathematics")

        def check(number: int) -> float:
            return float(any(_equal(truth, answer) for answer in _answers(group.completions[number])))

        ended = group.ended() if require_end else list(range(group.size))
        scores = check_each(check, ended, seconds, call)
        return [scores.get(number, 0.0) for number in range(group.size)]

    return score


def _equal(truth: list[Any], answer: str) -> bool:
    # The library's own limits are alarms, which do not interrupt the arithmetic of large numbers.
    return bool(verify(truth, parse(answer, parsing_timeout=0), timeout_seconds=0))


def _answers(completion: str) -> list[str]:
    """The response; of several boxes also the last alone, since the parser reads several as one set."""
    last = completion.rfind("\\boxed")
    return [completion, completion[last:]] if completion.count("\\boxed") > 1 else [completion]


def _expressions(truth: str) -> list[Any]:
    """The parsed ground truth, which data often gives as bare LaTeX, without the `$` that the parser looks for."""
    bare = "\\" in truth and "$" not in truth and "\\boxed" not in truth and "\\(" not in truth and "\\[" not in truth
    parsed: list[Any] = parse(f"${truth}$" if bare else truth, parsing_timeout=_TRUTH_SECONDS)
    return parsed or parse(f"${truth}$", parsing_timeout=_TRUTH_SECONDS)
