"""The `math` reward: 1 for a response that answers what the ground truth says."""

import logging

from rlhfless_functions.rewards.calls import Call, Scorer
from rlhfless_functions.rewards.checks import check_each
from rlhfless_functions.rewards.groups import RewardGroup
from rlhfless_functions.rewards.mathematics.answers import answer_of
from rlhfless_functions.rewards.mathematics.equality import same
from rlhfless_functions.rewards.mathematics.reading import read
from rlhfless_functions.rewards.mathematics.shapes import Reading
from rlhfless_functions.rewards.mathematics.truths import readings_of
from rlhfless_functions.rewards.thoughts import answer_span
from rlhfless_functions.rewards.truths import UnreadableTruthError


def math_scorer(require_end: bool = False, seconds: float = 5.0) -> Scorer:
    """Score 1 if the response's answer, after its thoughts, equals the ground truth, else 0.

    Args:
        require_end: score 0 if the response was truncated.
        seconds: CPU time to read and compare one response; above it the response scores 0.
    """
    # A response that can't be parsed is an ordinary wrong answer and needs no log line.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # Import here, before the forks.
    half, one = read(r"\frac{1}{2}"), read("x + 1")
    assert half is not None and one is not None
    same(half, one)

    def score(group: RewardGroup, call: Call) -> list[float]:
        try:
            truths = readings_of(group.ground_truth)
        except UnreadableTruthError as error:
            raise LookupError(f"the ground truth {group.ground_truth!r:.80} of row {group.prompt} {error}") from None

        def check(number: int) -> float:
            truncated = group.finish_reasons[number] == "truncated"
            return float(is_right(truths, group.completions[number], group.text, truncated))

        wanted = group.ended() if require_end else list(range(group.size))
        scores = check_each(check, wanted, seconds, call)
        return [scores.get(number, 0.0) for number in range(group.size)]

    return score


def is_right(truths: list[Reading], response: str, prompt: str = "", truncated: bool = False) -> bool:
    """Return whether what a response answers after its thoughts is one of the truths.

    Args:
        truths: the ground truth, see `readings_of`.
        response: the response.
        prompt: the prompt as the model saw it, which may begin the thoughts.
        truncated: whether the response was cut off.
    """
    span = answer_span(response, prompt)
    answer = answer_of(response[slice(*span)], truncated) if span else None
    return answer is not None and any(same(truth, answer) for truth in truths)
