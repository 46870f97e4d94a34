"""Groups of responses, as rewards get them."""

from collections.abc import Sequence

from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.rewards.groups import RewardGroup


def reward_group(
    prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[list[int]], finish_reasons: Sequence[str]
) -> RewardGroup:
    """Return the responses to a prompt: their texts without special tokens, their token ids, and the reasons for their
    ends."""
    return RewardGroup(
        prompt=prompt.row,
        text=prompt.text,
        messages=prompt.messages,
        completions=list(completions),
        completion_ids=list(completion_ids),
        finish_reasons=list(finish_reasons),
        columns={**prompt.columns, "ground_truth": prompt.ground_truth},
    )
