"""What functions in TRL's and verl's form are given, and what they may answer."""

import asyncio
from typing import Any

import pytest

from rlhfless_functions.rewards.callables import trl_scorer, verl_scorer
from rlhfless_functions.rewards.calls import Call, plain_scores
from rlhfless_functions.rewards.groups import RewardGroup

TEXT = RewardGroup(
    prompt=3,
    text="2+2=",
    messages=None,
    completions=["4", "5"],
    completion_ids=[[7, 1], [8]],
    finish_reasons=["stop", "truncated"],
    columns={"ground_truth": "4", "level": 2},
)
CHAT = RewardGroup(
    prompt=3,
    text="<user>2+2=<assistant>",
    messages=[{"role": "user", "content": "2+2="}],
    completions=["4"],
    completion_ids=[[7, 1]],
    finish_reasons=["stop"],
    columns={},
)


def given(function: Any, group: RewardGroup = TEXT) -> dict[str, Any]:
    return trl_scorer(function)(group, Call(step=12))


def test_trl_columns_are_repeated_for_each_completion() -> None:
    got = given(lambda **everything: everything)
    assert got["prompts"] == ["2+2=", "2+2="]
    assert got["completions"] == ["4", "5"]
    assert got["completion_ids"] == [[7, 1], [8]]
    assert got["ground_truth"] == ["4", "4"]
    assert got["level"] == [2, 2]
    assert got["finish_reasons"] == ["stop", "truncated"]
    assert got["trainer_state"].global_step == 12


def test_trl_functions_get_only_what_their_signature_names() -> None:
    assert given(lambda completions, level, unknown="default": (completions, level, unknown)) == (
        ["4", "5"],
        [2, 2],
        "default",
    )


def test_trl_functions_that_want_a_missing_column_are_told_which_there_are() -> None:
    with pytest.raises(LookupError, match=r"wants 'solution', but the data has no such column; it has .*level"):
        given(lambda completions, solution: None)


def test_trl_chat_prompts_and_completions_are_messages() -> None:
    prompts, completions = given(lambda prompts, completions: (prompts, completions), CHAT)
    assert prompts == [[{"role": "user", "content": "2+2="}]]
    assert completions == [[{"role": "assistant", "content": "4"}]]


def test_trl_functions_may_log() -> None:
    def reward(completions, log_metric, log_extra):
        log_metric("difficulty", 0.5)
        log_extra("thoughts", ["a", "b"])
        return [1.0, 1.0]

    call = Call(step=1)
    assert trl_scorer(reward)(TEXT, call) == [1.0, 1.0]
    assert call.metrics == [("difficulty", 0.5)]


def test_trl_class_instances_are_functions_too() -> None:
    class Reward:
        def __call__(self, completions, **columns):
            return [float(len(columns))] * len(completions)

    assert given(Reward())[0] > 3


def test_verl_functions_score_one_response_at_a_time() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info) == ("gsm8k", {"index": 5})
        return solution_str == ground_truth

    group = RewardGroup(
        **{**vars(TEXT), "columns": {**TEXT.columns, "data_source": "gsm8k", "extra_info": {"index": 5}}}
    )
    assert verl_scorer(compute_score)(group, Call(1)) == [1.0, 0.0]


def test_verl_functions_may_answer_with_a_dict() -> None:
    call = Call(1)
    score = verl_scorer(lambda solution_str, **_: {"score": 0.5, "acc": solution_str == "4", "pred": solution_str})
    assert score(TEXT, call) == [0.5, 0.5]
    assert call.metrics == [("acc", 1.0), ("acc", 0.0)]
    with pytest.raises(TypeError, match=r"a dict without 'score' \(it has acc\)"):
        verl_scorer(lambda **_: {"acc": 1.0})(TEXT, call)


def test_verl_functions_may_be_async_and_may_decline() -> None:
    async def compute_score(solution_str, ground_truth):
        return None if solution_str == "5" else 1

    assert asyncio.run(verl_scorer(compute_score)(TEXT, Call(1))) == [1.0, None]


def test_scores_of_any_numeric_type_are_floats() -> None:
    import numpy
    import torch

    assert plain_scores([True, 2, None, numpy.float32(0.5), torch.tensor(0.25)]) == [1.0, 2.0, None, 0.5, 0.25]
    assert plain_scores(torch.tensor([1.0, 0.0])) == [1.0, 0.0]
    assert plain_scores(numpy.array([1, 0])) == [1.0, 0.0]
