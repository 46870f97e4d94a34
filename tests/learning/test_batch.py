"""The batch of a training step: canonical order, whitening, minibatches, tensors."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.api import BatchReference, SampleTask
from rlhfless_functions.data.estimates import estimate_samples
from rlhfless_functions.data.rollouts import PreparedSample, VersionSpan, write_prepared
from rlhfless_functions.learning.batch import TrainingBatch, read_batch
from rlhfless_functions.model.micro_batches import WHOLE, Block, plan_micro_batches
from rlhfless_functions.model.shared_prompts import ResponseBatch
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import AlgorithmSettings, RewardSettings
from rlhfless_functions.settings.rewards import ExactMatchReward
from tests.learning.jobs import LEFT_OUT

torch.set_num_threads(1)

GRPO = AlgorithmSettings(name="grpo").resolved()
PPO = AlgorithmSettings(name="ppo", gamma=0.99, gae_lambda=0.9).resolved()
WHITENED = AlgorithmSettings(name="reinforce_plus_plus").resolved()
CPU = torch.device("cpu")


def sample(prompt: int, index: int, length: int, **given: Any) -> PreparedSample:
    return PreparedSample(
        **{
            "prompt": prompt,
            "index": index,
            "prompt_tokens": [1] * (2 + prompt),
            "response_tokens": [10 + index] * length,
            "log_probs": [-0.5 - index] * length,
            "finish_reason": "stop",
            "versions": [VersionSpan(0, 0, length)],
            "reward": 1.0,
            "advantages": [float(10 * prompt + index)] * length,
            **given,
        }
    )


SAMPLES = [sample(prompt, index, 1 + prompt + index) for prompt in range(4) for index in range(2)]


def reference(parts: list[str], samples: list[PreparedSample] = SAMPLES) -> BatchReference:
    tasks = [SampleTask(prompt=one.prompt, index=one.index) for one in samples]
    return BatchReference(step=3, parts=parts, samples=tasks)


def test_the_order_is_the_batch_s_whatever_parts_the_samples_came_in(tmp_path: Path) -> None:
    shuffled = random.Random(1).sample(SAMPLES, len(SAMPLES))
    parts = [str(tmp_path / f"{number}.parquet") for number in range(3)]
    for number, part in enumerate(parts):
        write_prepared(part, shuffled[number::3])
    for order in (parts, parts[::-1]):
        assert [one.key for one in read_batch(reference(order))] == [one.key for one in SAMPLES]


def test_a_sample_in_no_part_is_an_error_that_names_it(tmp_path: Path) -> None:
    part = str(tmp_path / "part.parquet")
    write_prepared(part, SAMPLES[:-1])
    with pytest.raises(TaskError, match=r"step 3: 1 of 8 samples.*\(3, 1\)") as caught:
        read_batch(reference([part]))
    assert caught.value.reason == "data_invalid"


def test_two_groups_of_one_prompt_come_from_the_parts_that_they_name(tmp_path: Path) -> None:
    parts = [str(tmp_path / f"{number}.parquet") for number in range(2)]
    older, newer = sample(1, 0, 4, advantages=[1.0] * 4), sample(1, 0, 7, advantages=[2.0] * 7)
    write_prepared(parts[0], [older, sample(2, 0, 3)])
    write_prepared(parts[1], [newer])
    named = reference(parts, [newer, older]).model_copy(update={"part_of": [1, 0]})
    assert read_batch(named) == [newer, older]
    lacking = named.model_copy(update={"samples": [SampleTask(prompt=1, index=0), SampleTask(prompt=9, index=0)]})
    with pytest.raises(TaskError, match=r"1 of 2 samples are in none of the batch's parts, .* \(9, 0\)"):
        read_batch(lacking)


@pytest.mark.parametrize(("field", "numbers"), [("part_of", [0]), ("part_of", [0, 2]), ("factors", [0.5])])
def test_a_batch_whose_parts_or_factors_do_not_fit_its_samples_is_refused(field: str, numbers: list[float]) -> None:
    tasks = [SampleTask(prompt=1, index=0), SampleTask(prompt=2, index=0)]
    with pytest.raises(ValueError, match=field):
        BatchReference.model_validate({"step": 1, "parts": ["a", "b"], "samples": tasks, field: numbers})


@pytest.mark.parametrize("algorithm", [GRPO, WHITENED], ids=["grpo", "whitened"])
def test_factors_multiply_the_advantages_that_are_learnt_from(algorithm: AlgorithmSettings) -> None:
    factors = [1.0, 0.5] * 4
    plain, weighed = TrainingBatch(SAMPLES, algorithm, 3), TrainingBatch(SAMPLES, algorithm, 3, factors)
    for row, factor in enumerate(factors):
        one, other = (batch.select(WHOLE, [row], CPU).numbers["advantages"] for batch in (plain, weighed))
        assert torch.equal(other, one * factor)


def test_numbers_stand_where_their_tokens_do() -> None:
    batch = TrainingBatch(SAMPLES, GRPO, 3)
    rows = [5, 0, 7]
    micro_batch = batch.select(WHOLE, rows, CPU)
    assert micro_batch.numbers.keys() == {"log_probs", "advantages"}
    for place, row in enumerate(rows):
        length = len(SAMPLES[row].response_tokens)
        assert micro_batch.tokens.response_mask[place].sum() == length
        assert micro_batch.tokens.response_ids[place, :length].tolist() == SAMPLES[row].response_tokens
        for name in ("log_probs", "advantages"):
            assert micro_batch.numbers[name][place, :length].tolist() == getattr(SAMPLES[row], name)
            assert not micro_batch.numbers[name][place, length:].any()


def test_whitening_is_over_all_tokens_of_the_step_that_are_in_the_loss() -> None:
    samples = [*SAMPLES, sample(9, 0, 50, mask=False, reward=None, advantages=[1e6] * 50)]
    batch = TrainingBatch(samples, WHITENED, 3)
    tokens = torch.tensor([value for one in SAMPLES for value in one.advantages or []], dtype=torch.float64)
    whitened = [
        batch.select(WHOLE, [row], CPU).numbers["advantages"][0, : batch.lengths[row]].double()
        for row in range(len(SAMPLES))
    ]
    torch.testing.assert_close(torch.cat(whitened), (tokens - tokens.mean()) / tokens.std(), rtol=1e-5, atol=1e-6)


def group_of_one_reward_beside_another(**given: Any) -> torch.Tensor:
    """The advantages of a group of equal rewards, beside a group whose good response is long."""
    algorithm = AlgorithmSettings(advantage_normalization="group_per_reward", **given).resolved()
    reward = RewardSettings(name="right", exact_match=ExactMatchReward())
    groups = [[sample(prompt, index, 1 + 9 * index) for index in range(2)] for prompt in range(2)]
    for group, rewards in zip(groups, [(1.0, 1.0), (0.0, 1.0)], strict=True):
        for one, score in zip(group, rewards, strict=True):
            one.reward, one.reward_terms = score, {"right": score}
        for one, row in zip(group, estimate_samples(group, algorithm, [reward]).advantages, strict=True):
            one.advantages = row[: len(one.response_tokens)].tolist()
    batch = TrainingBatch([one for group in groups for one in group], algorithm, 3)
    return torch.stack([batch.select(WHOLE, [row], CPU).numbers["advantages"][0, 0] for row in range(4)])


def test_a_group_of_equal_rewards_keeps_no_advantage_beside_others_of_other_lengths() -> None:
    assert group_of_one_reward_beside_another().tolist() == pytest.approx([0, 0, -1.2245, 1.2245], abs=1e-3)


def test_gdpo_may_whiten_over_tokens_as_verl_does() -> None:
    assert group_of_one_reward_beside_another(whiten_over="tokens")[0] < -0.5


def test_masked_samples_cost_nothing_and_count_nothing() -> None:
    samples = [*SAMPLES[:2], sample(8, 0, 500, mask=False, reward=None, advantages=None)]
    batch = TrainingBatch(samples, GRPO, 3)
    (block,) = plan_micro_batches(samples, batch.in_loss([0, 1, 2]), 10_000, share=True)
    assert sorted(row for run in block.runs for row in run) == [0, 1]
    assert batch.normalizer([0, 1, 2], 500) == 3  # tokens of the two others
    assert plan_micro_batches(samples, batch.in_loss([2]), 10_000, share=True) == []


def test_samples_in_the_loss_need_their_numbers() -> None:
    with pytest.raises(TaskError, match="step 3: a sample has no advantages"):
        TrainingBatch([*SAMPLES, sample(8, 0, 2, advantages=None)], GRPO, 3)
    with pytest.raises(TaskError, match="step 3: a sample has no values"):
        TrainingBatch([sample(7, 0, 1, values=[0.5]), sample(8, 0, 2)], GRPO, 3)
    assert "values" in TrainingBatch([sample(7, 0, 1, values=[0.5])], GRPO, 3)


def test_what_preparation_has_left_to_the_critic_comes_from_its_values() -> None:
    """Values are given in another order than the samples, as ranks give them."""
    factors = [1.0, 0.5] * 4 + [1.0]
    masked = sample(9, 0, 50, mask=False, reward=None, advantages=None)
    left = [replace(one, reward=one.index - 0.3, advantages=None) for one in SAMPLES] + [masked]
    lengths = [len(one.response_tokens) for one in SAMPLES]
    values = [[token / 8 - row / 4 for token in range(length)] for row, length in enumerate(lengths)]
    prepared = [*left]
    for row, length in enumerate(lengths):
        estimate = estimate_samples([replace(left[row], values=values[row])], PPO)
        assert estimate.returns is not None
        advantages, returns = estimate.advantages[0, :length].tolist(), estimate.returns[0, :length].tolist()
        prepared[row] = replace(left[row], values=values[row], advantages=advantages, returns=returns)
    expected = TrainingBatch(prepared, PPO, 3, factors)
    batch = TrainingBatch(left, PPO, 3, factors)
    assert (batch.needs_values, expected.needs_values) == (True, False)
    assert not any(name in batch for name in LEFT_OUT)
    order = [[6, 3], [0, 1, 2], [7, 5, 4]]
    batch.set_values((rows, torch.tensor([value for row in rows for value in values[row]])) for rows in order)
    for row in range(len(SAMPLES)):
        ours, theirs = (each.select(WHOLE, [row], CPU).numbers for each in (batch, expected))
        assert ours.keys() == theirs.keys() == {"log_probs", "values", "advantages", "returns"}
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_critic_values_samples_that_preparation_has_not() -> None:
    valued = sample(7, 0, 1, values=[0.5], returns=[0.5])
    assert not TrainingBatch([valued], PPO, 3).needs_values
    assert TrainingBatch([sample(7, 0, 1, advantages=None), sample(8, 0, 2, advantages=None)], PPO, 3).needs_values
    unscored = sample(8, 0, 2, advantages=None, mask=False, reward=None)
    assert not TrainingBatch([valued, unscored], PPO, 3).needs_values
    with pytest.raises(TaskError, match="a sample has no values"):
        TrainingBatch([valued, sample(8, 0, 2, advantages=None)], PPO, 3)


def test_a_mismatch_that_only_some_samples_tell_is_left_out() -> None:
    """In a step after the critic's warm-up some groups may be of a rollout before its end."""
    batch = TrainingBatch([sample(7, 0, 1, old_log_probs=[-0.5]), sample(8, 0, 2)], GRPO, 3)
    assert "prepared_log_probs" not in batch


@given(st.integers(1, 9), st.integers(-5, 5), st.integers(1, 100), st.integers(0, 3))
def test_minibatches_hold_every_sample_once_in_an_order_from_seed_step_and_epoch(
    size: int, seed: int, step: int, epoch: int
) -> None:
    batch = TrainingBatch(SAMPLES, GRPO, 3)
    cut = batch.minibatches(size, seed, step, epoch)
    assert cut == batch.minibatches(size, seed, step, epoch)
    assert sorted(row for minibatch in cut for row in minibatch) == list(range(8))
    assert all(len(minibatch) == size for minibatch in cut[:-1])
    if size >= 8:
        assert cut == [list(range(8))], "one update takes the canonical order"


def test_other_seeds_steps_and_epochs_give_other_orders() -> None:
    batch = TrainingBatch(SAMPLES, GRPO, 3)
    places = [(seed, step, epoch) for seed in range(3) for step in range(1, 4) for epoch in range(3)]
    assert len({str(batch.minibatches(2, *place)) for place in places}) == len(places)
    assert batch.minibatches(None, 0, 1, 0) == [list(range(8))]


def test_where_a_prompt_is_shared_the_responses_stand_alone() -> None:
    batch = TrainingBatch(SAMPLES, GRPO, 3)
    block = Block(prompts=[4, 0], runs=[[5, 0, 4]])
    micro_batch = batch.select(block, block.runs[0], CPU)
    assert isinstance(micro_batch.tokens, ResponseBatch)
    assert micro_batch.tokens.prompts.tolist() == [0, 1, 0]
    assert micro_batch.tokens.response_ids[0].tolist() == SAMPLES[5].response_tokens
    assert torch.equal(micro_batch.numbers["advantages"], batch.select(WHOLE, block.runs[0], CPU).numbers["advantages"])
