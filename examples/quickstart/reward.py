"""The quickstart's reward, in the form that TRL's users know: lists in, one number for each completion out."""

import re

EOS_TOKEN_ID = 1
"""Position of `<eos>` in the model's vocabulary. The text alone does not say whether a response ended by itself."""

_RESULT = re.compile(r"#(\d+)")


def reward(
    completions: list[str], completion_ids: list[list[int]], ground_truth: list[str], **columns: object
) -> list[float]:
    """1 where the response ended by itself and has exactly one `#`, followed by the right number; else 0."""
    return [
        float(ids[-1:] == [EOS_TOKEN_ID] and text.count("#") == 1 and _RESULT.findall(text) == [truth])
        for text, ids, truth in zip(completions, completion_ids, ground_truth, strict=True)
    ]
