"""Stages that pass samples in one row without padding learn and say what they do with padded ones."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.data.rollouts import GeneratedSample, PreparedSample
from rlhfless_functions.model import packed_attention
from rlhfless_functions.model.forward import PASS_OVERHEAD_TOKENS, cost_of, micro_batches, packed_batches
from rlhfless_functions.model.micro_batches import plan_micro_batches, prompt_numbers
from rlhfless_functions.settings import AlgorithmSettings, BatchSettings, KlSettings, LearningSettings
from tests.learning.steps import assert_same_gradients, learn_request, ragged_samples, take_step
from tests.preparation.batches import KL, BatchFolder
from tests.preparation.batches import place as place  # The fixtures.
from tests.preparation.batches import preparer as preparer

torch.set_num_threads(1)

LENGTHS = st.lists(st.integers(1, 300), max_size=40)


@given(LENGTHS, st.integers(1, 2000))
def test_rows_hold_every_sample_once_within_the_budget_and_are_few(lengths: list[int], budget: int) -> None:
    rows = packed_batches(lengths, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    full = [sum(lengths[index] for index in row) for row in rows]
    assert all(len(row) == 1 or tokens <= budget for row, tokens in zip(rows, full, strict=True))
    assert full == sorted(full, reverse=True)
    # First fit leaves at most one row half empty.
    assert sum(2 * tokens <= budget for tokens in full) <= 1
    assert cost_of(rows, lengths, packed=True) == sum(lengths) + PASS_OVERHEAD_TOKENS * len(rows)


@given(LENGTHS, st.integers(300, 2000))
def test_rows_cost_no_more_than_padded_passes_within_the_same_budget(lengths: list[int], budget: int) -> None:
    padded = micro_batches(lengths, budget)
    rows = packed_batches(lengths, budget)
    assert cost_of(rows, lengths, packed=True) <= cost_of(padded, lengths) + PASS_OVERHEAD_TOKENS


GROUPS = st.lists(st.tuples(st.integers(1, 300), st.lists(st.integers(1, 200), min_size=1, max_size=8)), max_size=8)


@given(GROUPS, st.integers(1, 3000), st.booleans(), st.randoms())
def test_a_plan_of_rows_counts_tokens_without_padding(
    groups: list[tuple[int, list[int]]], budget: int, share: bool, draw: random.Random
) -> None:
    samples = [
        GeneratedSample(prompt, index, [prompt] * length, [1] * response, [0.0] * response, "stop", [])
        for prompt, (length, responses) in enumerate(groups)
        for index, response in enumerate(responses)
    ]
    chosen = draw.sample(range(len(samples)), draw.randint(0, len(samples)))
    blocks = plan_micro_batches(samples, chosen, budget, share=share, packed=True)
    assert blocks == plan_micro_batches(samples, draw.sample(chosen, len(chosen)), budget, share=share, packed=True)
    assert sorted(row for block in blocks for run in block.runs for row in run) == sorted(chosen)
    for block in blocks:
        prompts = sum(len(samples[row].prompt_tokens) for row in block.prompts)
        assert len(block.prompts) <= 1 or prompts <= budget // 2
        for run in block.runs:
            own = sum(len(samples[row].response_tokens) for row in run)
            if block.prompts:
                numbers = prompt_numbers(samples, block, run)
                assert [samples[block.prompts[number]].prompt for number in numbers] == [
                    samples[row].prompt for row in run
                ]
            else:
                own += sum(len(samples[row].prompt_tokens) for row in run)
            assert len(run) == 1 or own + prompts <= budget


def samples_with_prompts(length: int) -> list[PreparedSample]:
    samples = ragged_samples()
    for sample in samples:
        tokens = range(length + 5 * sample.prompt)
        sample.prompt_tokens = [2 + (sample.prompt + place * place) % 50 for place in tokens]
    return samples


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each packed row that a model is given."""
    made: list[int] = []
    original = packed_attention.positions

    def counted(lengths: Any, first: Any = None) -> torch.Tensor:
        made.append(sum(lengths))
        return original(lengths, first)

    monkeypatch.setattr(packed_attention, "positions", counted)
    return made


@pytest.mark.parametrize("learning", [{}, {"gradient_checkpointing": True}, {"share_prompts": False}], ids=str)
@pytest.mark.parametrize("length", [3, 200])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_an_update_is_that_of_padded_passes(
    tiny_model: Path, calls: list[int], name: Any, length: int, learning: dict[str, Any]
) -> None:
    found = {}
    for pack in ("never", "always"):
        request = learn_request(
            tiny_model,
            algorithm=AlgorithmSettings(name=name, kl=KlSettings(coefficient=0.1), entropy_coefficient=0.01),
            batch_settings=BatchSettings(prompts_per_step=4, samples_per_prompt=2, microbatch_tokens=900),
            learning=LearningSettings(pack=pack, **learning),
        )
        assert calls == []
        found[pack] = take_step(request, samples_with_prompts(length))
    assert calls
    (state, packed, policy, critic), (_, padded, plain, plain_critic) = found["always"], found["never"]
    assert state.packed
    assert_same_gradients(policy[0], plain[0])
    if name == "ppo":
        assert_same_gradients(critic[0], plain_critic[0])
    assert packed.tokens + packed.shared_tokens == padded.tokens + padded.shared_tokens
    assert (packed.shared_tokens > 0) == (length == 200 and "share_prompts" not in learning)
    for quantity, value in packed.summary().items():
        assert value == pytest.approx(padded.summary()[quantity], rel=1e-4, abs=1e-5), quantity


def test_the_same_batch_gives_the_same_bits(tiny_model: Path) -> None:
    request = learn_request(tiny_model, learning=LearningSettings(pack="always"))
    (_, _, (one,), _), (_, _, (other,), _) = (take_step(request, samples_with_prompts(200)) for _ in range(2))
    assert_same_gradients(one, other, tolerance=0)


def test_on_a_cpu_nothing_is_packed_unless_asked_for(tiny_model: Path, calls: list[int]) -> None:
    state, *_ = take_step(learn_request(tiny_model), ragged_samples())
    assert not state.packed
    assert calls == []


def prepared(place: BatchFolder, **settings: Any) -> list[PreparedSample]:
    algorithm = AlgorithmSettings(name="ppo", kl=KL).resolved()
    _, samples = place.prepare(old_log_probs=True, reference=place.initial, algorithm=algorithm, **settings)
    return samples


@pytest.mark.parametrize("share", [False, True])
def test_preparation_says_of_packed_samples_what_it_says_of_padded_ones(
    place: BatchFolder, calls: list[int], share: bool
) -> None:
    place.materialize([{"prompt": "1+2*3-4;" * 7, "answer": "2"}, {"prompt": "7" * 60, "answer": "4"}])
    place.generate({0: ["2", "3", "2 2 2", "7", "88"], 1: ["5", "4", "44444", "6", ""]})
    padded = prepared(place, share_prompts=share, pack="never")
    assert calls == []
    packed = prepared(place, share_prompts=share, pack="always")
    assert calls
    for one, other in zip(packed, padded, strict=True):
        assert one.old_log_probs == pytest.approx(other.old_log_probs, abs=1e-5)
        assert one.reference_log_probs == pytest.approx(other.reference_log_probs, abs=1e-5)
        assert one.values == pytest.approx(other.values, abs=1e-5)
    # A group's rows are the same in every chunk.
    sink = str(place.folder / "chunk.parquet")
    assert prepared(place, share_prompts=share, pack="always", samples=place.tasks[5:], sink=sink) == packed[5:]
    assert prepared(place, share_prompts=share, pack="never") == padded, "the models can be given padded samples again"
