"""Mathematical equality, by the library made for it: https://github.com/huggingface/Math-Verify."""

import logging
from typing import Any

from math_verify import parse, verify

from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.groups import RewardGroup

PARSE_SECONDS = 5
"""Time that one expression may take to parse or compare; past it the response counts as wrong."""


def math_scorer() -> Scorer:
    """1 where the response's last mathematical expression (`\\boxed{}` first) equals the ground truth, else 0.

    math-verify keeps its time limits with SIGALRM, which only a process's main thread may use: a worker's.
    """
    # A response that cannot be parsed in time is an ordinary wrong answer, not news.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def score(group: RewardGroup, call: Call) -> list[float]:
        truth = _expressions(str(group.ground_truth).strip())
        if not truth:
            raise LookupError(f"the ground truth {group.ground_truth!r} of row {group.prompt} is no mathematics")
        return [
            float(any(_equal(truth, answer) for answer in _answers(completion))) for completion in group.completions
        ]

    return score


def _equal(truth: list[Any], answer: str) -> bool:
    return bool(verify(truth, parse(answer, parsing_timeout=PARSE_SECONDS), timeout_seconds=PARSE_SECONDS))


def _answers(completion: str) -> list[str]:
    """The response; of several boxes also the last alone, since the parser reads several as one set."""
    last = completion.rfind("\\boxed")
    return [completion, completion[last:]] if completion.count("\\boxed") > 1 else [completion]


def _expressions(truth: str) -> list[Any]:
    """The parsed ground truth, which data often gives as bare LaTeX, without the `$` that the parser looks for."""
    bare = "\\" in truth and "$" not in truth and "\\boxed" not in truth and "\\(" not in truth and "\\[" not in truth
    parsed: list[Any] = parse(f"${truth}$" if bare else truth, parsing_timeout=PARSE_SECONDS)
    return parsed or parse(f"${truth}$", parsing_timeout=PARSE_SECONDS)
