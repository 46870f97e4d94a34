"""A reward of one's own: how good a response is, as one number for each.

Any Python works here, and any package that is installed where rewards run. Every column of the data arrives as a
list with one entry for each completion; `answer` is a column of prompts.jsonl. Return None for a response that cannot
be scored.
"""


def reward(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the right answer after the last `#`, and a tenth for having answered at all."""
    scores = []
    for text, right in zip(completions, answer, strict=True):
        _, mark, given = text.rpartition("#")
        scores.append(1.0 if mark and given == right else 0.1 if given.isdigit() else 0.0)
    return scores
