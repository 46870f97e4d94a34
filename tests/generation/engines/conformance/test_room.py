"""The cache's budget bounds what runs at a time, and what can have no room is refused before anything is computed."""

import pytest

from rlhfless_functions.generation.engines.base import Engine, SequenceTask
from rlhfless_functions.runtime.task import TaskError
from tests.generation.engines.shares import SAMPLING, share


def test_a_share_may_be_far_larger_than_the_batch(engine: Engine) -> None:
    sampling = SAMPLING.model_copy(update={"max_response_tokens": 3})
    run = engine.start(share(125, 8), sampling, 20 * 64)
    most = 0
    results = []
    while run.running or run.waiting:
        results += run.step()
        most = max(most, run.running)
    assert len({(result.prompt, result.index) for result in results}) == 1000
    assert 8 <= most <= 20


def test_the_cache_budget_bounds_the_running_sequences_and_order_is_kept(engine: Engine) -> None:
    tasks = [task for task in share(8, 2) if len(task.prompt_tokens) < 33]
    needed = 64  # 32 + 24 tokens, in whole blocks
    run = engine.start(tasks, SAMPLING, 3 * needed)
    order = {(task.prompt, task.index): place for place, task in enumerate(tasks)}
    finished = 0
    while run.running or run.waiting:
        finished += len(run.step())
        assert run.running <= 3
        admitted = finished + run.running
        assert {order[prompt, index] for prompt, index, _ in run.lengths()} <= set(range(admitted))
    assert finished == len(tasks)


def test_a_sequence_that_cannot_fit_the_budget_is_refused(engine: Engine) -> None:
    with pytest.raises(TaskError, match=r"can have 64 tokens .* holds 63") as caught:
        engine.start(share(8, 1), SAMPLING, 63)
    assert caught.value.reason == "bad_request"


def test_a_prompt_beyond_the_models_positions_is_refused(engine: Engine) -> None:
    task = SequenceTask(5, 0, [2] * 120, seed=0)
    with pytest.raises(TaskError, match=r"prompt 5 has 120 tokens.*model's 128 positions"):
        engine.start([task], SAMPLING, None)


def test_a_prompt_without_tokens_is_refused(engine: Engine) -> None:
    with pytest.raises(TaskError, match="prompt 5 has no tokens"):
        engine.start([SequenceTask(5, 0, [], seed=0)], SAMPLING, None)


def test_lengths_count_the_tokens_of_the_running_sequences(engine: Engine) -> None:
    run = engine.start(share(2, 2), SAMPLING, None)
    run.step()
    run.step()
    assert run.waiting == 0
    assert [length for *_, length in run.lengths()] == [2] * run.running
    assert [len(partial.response_tokens) for partial in run.unfinished()] == [2] * run.running
