"""What functions in TRL's and verl's form are given, and what they may answer."""

import asyncio
import inspect
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from rlhfless_functions.rewards.callables import TrainerState, scorer_of, trl_scorer, verl_scorer
from rlhfless_functions.rewards.calls import Call, plain_scores
from rlhfless_functions.rewards.groups import Progress, RewardGroup

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
    return trl_scorer(function)(group, Call(Progress(11, 40, 0.5, 2)))


def test_trl_columns_are_repeated_for_each_completion() -> None:
    got = given(lambda **everything: everything)
    assert got["prompts"] == ["2+2=", "2+2="]
    assert got["completions"] == ["4", "5"]
    assert got["completion_ids"] == [[7, 1], [8]]
    assert got["ground_truth"] == ["4", "4"]
    assert got["level"] == [2, 2]
    assert got["finish_reasons"] == ["stop", "truncated"]
    state = got["trainer_state"]
    assert (state.global_step, state.max_steps, state.epoch, state.num_train_epochs) == (11, 40, 0.5, 2)


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

    call = Call()
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
    assert verl_scorer(compute_score)(group, Call()) == [1.0, 0.0]


def test_verl_functions_may_answer_with_a_dict() -> None:
    call = Call()
    score = verl_scorer(lambda solution_str, **_: {"score": 0.5, "acc": solution_str == "4", "pred": solution_str})
    assert score(TEXT, call) == [0.5, 0.5]
    assert call.metrics == [("acc", 1.0), ("acc", 0.0)]
    with pytest.raises(TypeError, match=r"a dict without 'score' \(it has acc\)"):
        verl_scorer(lambda **_: {"acc": 1.0})(TEXT, call)


def test_verl_functions_may_be_async_and_may_decline() -> None:
    async def compute_score(solution_str, ground_truth):
        return None if solution_str == "5" else 1

    assert asyncio.run(verl_scorer(compute_score)(TEXT, Call())) == [1.0, None]


def test_scores_of_any_numeric_type_are_floats() -> None:
    import numpy
    import torch

    assert plain_scores([True, 2, None, numpy.float32(0.5), torch.tensor(0.25)]) == [1.0, 2.0, None, 0.5, 0.25]
    assert plain_scores(torch.tensor([1.0, 0.0])) == [1.0, 0.0]
    assert plain_scores(numpy.array([1, 0])) == [1.0, 0.0]


def test_trainer_state_has_the_fields_of_transformers() -> None:
    from transformers import TrainerState as Theirs

    assert {field.name for field in fields(Theirs)} <= {field.name for field in fields(TrainerState)}


def test_the_prompts_column_and_messages_reach_a_function_that_names_them() -> None:
    group = replace(CHAT, columns={"prompt": "raw", "question": "2+2="})
    assert given(lambda completions, prompt, messages: (prompt, messages), group) == (["raw"], [CHAT.messages])
    assert given(lambda completions, question: question, group) == ["2+2="]
    assert given(lambda completions, messages: messages) == [None, None]
    # TRL passes a column `prompt` to nobody; the others it does.
    rest = given(lambda completions, **columns: columns, group)
    assert "question" in rest
    assert rest.keys().isdisjoint({"prompt", "messages"})


def verl_one(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}


def verl_short(solution_str, ground_truth, **kwargs):
    return float(solution_str == ground_truth)


async def verl_async(data_source, solution_str, ground_truth, extra_info):
    return solution_str == ground_truth


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert len(data_sources) == len(extra_infos) == 2
    return [verl_one(None, *pair) for pair in zip(solution_strs, ground_truths, strict=True)]


def verl_batch_of_numbers(data_sources, solution_strs, ground_truths, extra_infos):
    import numpy

    return numpy.array([float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)])


async def verl_batch_async(solution_strs, ground_truths, **kwargs):
    return [float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]


def verl_with_a_column(solution_str, ground_truth, level, messages):
    assert (level, messages) == (2, None)
    return float(solution_str == ground_truth)


def openrlhf_list(queries, prompts, labels, **kwargs):
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    return [float(answer == label) for answer, label in zip(answers, labels, strict=True)]


def openrlhf_tensor(queries, prompts, labels):
    import torch

    return torch.tensor(openrlhf_list(queries, prompts, labels))


def openrlhf_dict(queries, prompts, labels, **kwargs):
    import torch

    rewards = openrlhf_tensor(queries, prompts, labels)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"length": torch.tensor([1.0, 1.0]), "ok": 1.0}}


async def openrlhf_async(queries, prompts, labels):
    return openrlhf_list(queries, prompts, labels)


def trl_plain(completions, ground_truth, **kwargs):
    return [float(a == b) for a, b in zip(completions, ground_truth, strict=True)]


def trl_named_like_verls(completions, ground_truth, data_source="mine", extra_info=None):
    return trl_plain(completions, ground_truth)


@pytest.mark.parametrize(
    "function",
    [verl_one, verl_short, verl_async, verl_batch, verl_batch_of_numbers, verl_batch_async, verl_with_a_column,
     openrlhf_list, openrlhf_tensor, openrlhf_dict, openrlhf_async, trl_plain, trl_named_like_verls,
     partial(verl_one, extra_info={}), partial(trl_plain, extra=1)],
    ids=lambda function: getattr(function, "__name__", None) or f"{function.func.__name__} with arguments given",
)  # fmt: skip
def test_a_functions_form_is_told_by_its_signature(function: Any) -> None:
    scores = scorer_of(function)(TEXT, Call())
    assert plain_scores(asyncio.run(scores) if inspect.isawaitable(scores) else scores) == [1.0, 0.0]


def test_a_form_that_the_signature_does_not_tell_is_set_by_style() -> None:
    assert scorer_of(lambda **given: float(given["solution_str"] == "4"), "verl")(TEXT, Call()) == [1.0, 0.0]
    assert scorer_of(lambda **given: [len(given["queries"])] * 2, "openrlhf")(TEXT, Call()) == [2, 2]
    with pytest.raises(LookupError, match=r"wants 'response'.*set python\.style"):
        scorer_of(lambda response: 1.0)(TEXT, Call())


def test_numbers_of_numpy_and_torch_are_logged_and_nothing_else_is() -> None:
    import numpy
    import torch

    logged = {"a": numpy.float32(0.5), "b": torch.tensor(2.0), "c": numpy.int64(3), "d": True, "e": "text", "f": None,
              "g": numpy.zeros(3), "h": torch.zeros(2), "i": "1.5", "j": [1.0], "k": numpy.bool_(True)}  # fmt: skip
    call = Call()
    verl_scorer(lambda solution_str: {"score": numpy.float64(1.0), **logged})(replace(TEXT, completions=["4"]), call)
    assert call.metrics == [("a", 0.5), ("b", 2.0), ("c", 3.0), ("d", 1.0), ("k", 1.0)]
    call = Call()
    trl_scorer(lambda completions, log_metric: [log_metric("x", torch.tensor(0.25))])(TEXT, call)
    assert call.metrics == [("x", 0.25)]
    call = Call()
    scorer_of(openrlhf_dict)(TEXT, call)
    assert call.metrics == [("length", 1.0), ("length", 1.0), ("ok", 1.0)]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda solution_strs: 1.0, r"returned 1\.0, not a list with one score"),
        (lambda solution_strs: None, "returned None, not a list"),
        (lambda queries: {"reward": [1.0]}, r"a dict without 'rewards' \(it has reward\)"),
    ],
)
def test_an_answer_of_another_form_is_an_error(function: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        scorer_of(function)(TEXT, Call())
