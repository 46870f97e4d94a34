"""How samples are cut into passes: nothing is lost, budgets hold, and prompts are shared where that is cheaper."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.model.forward import micro_batches
from rlhfless_functions.model.micro_batches import KEYS_PER_TOKEN, Block, plan_micro_batches, prompt_numbers


def rollouts(groups: list[tuple[int, list[int]]]) -> list[GeneratedSample]:
    """A group for each (prompt length, response lengths)."""
    return [
        GeneratedSample(prompt, index, [prompt] * length, [1] * response, [0.0] * response, "stop", [])
        for prompt, (length, responses) in enumerate(groups)
        for index, response in enumerate(responses)
    ]


GROUPS = st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(1, 200), min_size=1, max_size=8)), max_size=8)


@given(GROUPS, st.integers(1, 3000), st.booleans(), st.randoms())
def test_every_sample_is_passed_once_within_the_budget(
    groups: list[tuple[int, list[int]]], budget: int, share: bool, draw: random.Random
) -> None:
    samples = rollouts(groups)
    chosen = draw.sample(range(len(samples)), draw.randint(0, len(samples)))
    blocks = plan_micro_batches(samples, chosen, budget, share=share)
    assert blocks == plan_micro_batches(samples, draw.sample(chosen, len(chosen)), budget, share=share)
    assert sorted(row for block in blocks for run in block.runs for row in run) == sorted(chosen)
    for block in blocks:
        width = max((len(samples[row].prompt_tokens) for row in block.prompts), default=0)
        assert len(block.prompts) <= 1 or len(block.prompts) * width <= budget // 2
        for run in block.runs:
            if block.prompts:
                numbers = prompt_numbers(samples, block, run)
                assert [samples[block.prompts[number]].prompt for number in numbers] == [
                    samples[row].prompt for row in run
                ]
                longest = max(len(samples[row].response_tokens) for row in run) + width // KEYS_PER_TOKEN
                assert len(run) == 1 or len(run) * longest + len(block.prompts) * width <= budget
            else:
                lengths = [len(samples[row].prompt_tokens + samples[row].response_tokens) for row in run]
                assert len(run) == 1 or len(run) * max(lengths) <= budget


def computed(samples: list[GeneratedSample], blocks: list[Block]) -> int:
    total = 0
    for block in blocks:
        total += sum(len(samples[row].prompt_tokens) for row in block.prompts)
        for run in block.runs:
            total += sum(len(samples[row].response_tokens) for row in run)
            total += 0 if block.prompts else sum(len(samples[row].prompt_tokens) for row in run)
    return total


def test_a_long_prompt_of_a_group_is_computed_once() -> None:
    samples = rollouts([(200, [50] * 8), (180, [60] * 8)])
    (block,) = plan_micro_batches(samples, range(16), 10_000, share=True)
    assert sorted(samples[row].prompt for row in block.prompts) == [0, 1]
    assert computed(samples, [block]) == 200 + 180 + 8 * 50 + 8 * 60


@pytest.mark.parametrize(
    "groups",
    [[(200, [50])] * 8, [(4, [50] * 8)] * 2],
    ids=["one sample of each group", "short prompts"],
)
def test_samples_are_passed_whole_where_sharing_would_not_pay(groups: list[tuple[int, list[int]]]) -> None:
    samples = rollouts(groups)
    everything = range(len(samples))
    blocks = plan_micro_batches(samples, everything, 10_000, share=True)
    assert blocks == plan_micro_batches(samples, everything, 10_000, share=False)
    assert blocks[0].prompts == []


def test_a_model_that_cannot_share_gets_whole_samples() -> None:
    samples = rollouts([(200, [50] * 8)])
    (block,) = plan_micro_batches(samples, range(8), 1_000, share=False)
    assert block == Block([], micro_batches([250] * 8, 1_000))


def test_nothing_chosen_is_nothing_to_pass() -> None:
    assert plan_micro_batches(rollouts([(5, [1])]), [], 100, share=True) == []


def test_groups_with_the_same_prompt_share_it() -> None:
    samples = rollouts([(300, [20] * 4), (300, [20] * 4)])
    for sample in samples:
        sample.prompt_tokens = [7] * 300
    (block,) = plan_micro_batches(samples, range(8), 10_000, share=True)
    assert len(block.prompts) == 1
