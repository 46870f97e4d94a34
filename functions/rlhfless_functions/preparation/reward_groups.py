"""Groups of responses, as rewards get them."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.rewards.groups import Message, RewardGroup


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


def head(given: Sequence[tuple[int, int]]) -> int:
    """Return how many of a response's first tokens are given: they end the prompt."""
    return given[0][1] if given and given[0][0] == 0 else 0


def with_episodes(
    group: RewardGroup, samples: Sequence[GeneratedSample], tokenizer: PreTrainedTokenizerBase
) -> RewardGroup:
    """Return a group with its conversations, and what its environments scored."""
    outcomes = [sample.outcome or {} for sample in samples]
    return replace(
        group,
        conversations=[conversation(sample, tokenizer) for sample in samples],
        episode_scores=[outcome.get("score") for outcome in outcomes],
        dropped=[bool(outcome.get("dropped")) for outcome in outcomes],
    )


def conversation(sample: GeneratedSample, tokenizer: PreTrainedTokenizerBase, *, whole: bool = False) -> list[Message]:
    """Return a response as messages: the model's turns, and what came between them.

    Args:
        sample: a sample with an environment.
        tokenizer: the model's.
        whole: with the template's special tokens.
    """
    messages: list[Message] = []
    place = head(sample.given)
    end = len(sample.response_tokens)
    for start, stop in [*(span for span in sample.given if span[0] >= place), (end, end)]:
        for role, first, last in (("assistant", place, start), ("tool", start, stop)):
            if first < last:
                text = tokenizer.decode(sample.response_tokens[first:last], skip_special_tokens=not whole)
                messages.append({"role": role, "content": text})
        place = stop
    return messages
