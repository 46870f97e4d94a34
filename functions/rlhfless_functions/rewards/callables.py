"""The function signatures of TRL, verl and OpenRLHF."""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfless_functions.rewards.calls import Call, Scorer, is_async, plain_number
from rlhfless_functions.rewards.groups import RewardGroup

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ON_REQUEST = ("prompt", "messages")
"""Arguments that `**columns` does not collect, because TRL does not pass them: a function that names them gets them."""


@dataclass
class TrainerState:
    """TRL's `trainer_state`, with the fields of transformers' class. The first four have the job's numbers."""

    global_step: int = 0
    """Steps that are finished."""
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 0
    logging_steps: int = 1
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int | None = None
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)


def scorer_of(function: Callable[..., Any], style: str | None = None) -> Scorer:
    """Adapt a function in the form of `style`, or, by default, in the form that its signature names.

    verl's has `solution_str`, or `solution_strs` in batches; OpenRLHF's has `queries`; all others are TRL's.
    """
    names = inspect.signature(function).parameters
    if style is None:
        style = "verl" if {"solution_str", "solution_strs"} & names.keys() else "trl"
        if "queries" in names and "completions" not in names:
            style = "openrlhf"
    if style == "openrlhf":
        return openrlhf_scorer(function)
    if style == "verl":
        return verl_batch_scorer(function) if "solution_strs" in names else verl_scorer(function)
    return trl_scorer(function)


def trl_scorer(function: Callable[..., Any]) -> Scorer:
    """Adapt TRL's form, `fn(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async.

    The function gets the keyword arguments that its signature names, or all of them if it takes `**kwargs`: one list
    per column of the dataset, `ground_truth`, `finish_reasons`, and TRL's `trainer_state`, `log_metric` and `log_extra`
    (which is accepted and ignored: there is no completions table here). Prompts and completions are text, or lists of
    chat messages if the dataset's prompt is one. Only if its signature names them, it gets `messages` (the prompt's, or
    None) and the column `prompt`.
    """
    signature = inspect.signature(function)

    def score(group: RewardGroup, call: Call) -> Any:
        return function(**_select(signature, _trl_arguments(group, call)))

    return score


def verl_scorer(function: Callable[..., Any]) -> Scorer:
    """Adapt verl's form, `compute_score(data_source, solution_str, ground_truth, extra_info)`, sync or async.

    It is called once per response and returns a number or a dict with `score`, whose other numbers are logged.
    `data_source` and `extra_info` are columns of the dataset, or empty if it has none. A function that names other
    columns gets them, too.
    """
    signature = inspect.signature(function)

    def results(group: RewardGroup) -> list[Any]:
        shared = _verl_arguments(group)
        return [
            function(**_select(signature, {**shared, "solution_str": completion}, group))
            for completion in group.completions
        ]

    return _verl(function, results, asyncio.gather)


def verl_batch_scorer(function: Callable[..., Any]) -> Scorer:
    """Adapt verl's batch form, `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`, sync or async.

    It is called once per group with one entry for each response, and returns a list of what `verl_scorer`'s function
    returns.
    """
    signature = inspect.signature(function)

    def results(group: RewardGroup) -> Any:
        batch = {f"{name}s": [value] * group.size for name, value in _verl_arguments(group).items()}
        return function(**_select(signature, {**batch, "solution_strs": group.completions}, group))

    async def waited(result: Any) -> Any:
        return await result

    return _verl(function, results, waited)


def openrlhf_scorer(function: Callable[..., Any]) -> Scorer:
    """Adapt OpenRLHF's form, `reward_func(queries, prompts, labels, **kwargs)`, sync or async.

    Queries are prompts with their responses, labels the ground truths. It returns a list or a tensor of rewards, or a
    dict with `rewards` and perhaps `extra_logs`, whose numbers are logged.
    """
    signature = inspect.signature(function)

    def result(group: RewardGroup) -> Any:
        arguments = {
            "queries": [group.text + completion for completion in group.completions],
            "prompts": [group.text] * group.size,
            "labels": [group.columns.get("ground_truth")] * group.size,
        }
        return function(**_select(signature, arguments, group))

    def rewards(answer: Any, call: Call) -> Any:
        if not isinstance(answer, Mapping):
            return answer
        if "rewards" not in answer:
            raise TypeError(f"returned a dict without 'rewards' (it has {', '.join(map(str, answer)) or 'nothing'})")
        for name, values in (answer.get("extra_logs") or {}).items():
            for value in values if _is_list(values) else [values]:
                _log(call, name, value)
        return answer["rewards"]

    def score(group: RewardGroup, call: Call) -> Any:
        return rewards(result(group), call)

    async def score_async(group: RewardGroup, call: Call) -> Any:
        return rewards(await result(group), call)

    return score_async if is_async(function) else score


def _verl(function: Callable[..., Any], results: Callable[[RewardGroup], Any], gather: Callable[..., Any]) -> Scorer:
    """Return the scorer of a function in one of verl's forms; `gather` waits for its results if it is async."""

    def score(group: RewardGroup, call: Call) -> list[float | None]:
        return [_verl_number(result, call) for result in _several(results(group))]

    async def score_async(group: RewardGroup, call: Call) -> list[float | None]:
        pending = results(group)
        answers = await (gather(*pending) if isinstance(pending, list) else gather(pending))
        return [_verl_number(result, call) for result in _several(answers)]

    return score_async if is_async(function) else score


def _several(answers: Any) -> Any:
    if not _is_list(answers):
        raise TypeError(f"returned {answers!r:.80}, not a list with one score per response")
    return answers


def _is_list(value: Any) -> bool:
    """Return whether a value is a sequence of numbers: a list, an array or a tensor, but not a single number."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        return False
    return isinstance(value, Sequence) or getattr(value, "ndim", 1) > 0


def _verl_arguments(group: RewardGroup) -> dict[str, Any]:
    return {
        "data_source": group.columns.get("data_source", ""),
        "ground_truth": group.columns.get("ground_truth"),
        "extra_info": group.columns.get("extra_info") or {},
    }


def _trl_arguments(group: RewardGroup, call: Call) -> dict[str, Any]:
    chat = group.messages is not None
    completions: list[Any] = group.conversations or [
        [{"role": "assistant", "content": completion}] if chat else completion for completion in group.completions
    ]

    def log_metric(name: str, value: float) -> None:
        call.metrics.append((str(name), plain_number(value)))

    return {
        "messages": [group.messages] * group.size,
        **{name: [value] * group.size for name, value in group.columns.items()},
        "prompts": [group.messages if chat else group.text] * group.size,
        "completions": completions,
        "completion_ids": group.completion_ids,
        "finish_reasons": group.finish_reasons,
        "trainer_state": TrainerState(
            global_step=call.progress.finished,
            max_steps=call.progress.total,
            epoch=call.progress.epoch,
            num_train_epochs=call.progress.epochs,
        ),
        "log_metric": log_metric,
        "log_extra": lambda column, values: None,
    }


def _verl_number(result: Any, call: Call) -> float | None:
    if not isinstance(result, Mapping):
        return None if result is None else plain_number(result)
    if "score" not in result:
        raise TypeError(f"returned a dict without 'score' (it has {', '.join(map(str, result)) or 'nothing'})")
    for name, value in result.items():
        if name != "score":
            _log(call, name, value)
    return None if result["score"] is None else plain_number(result["score"])


def _log(call: Call, name: object, value: Any) -> None:
    """Log a number of any kind: Python's, NumPy's or torch's. Anything else is no metric."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        call.metrics.append((str(name), plain_number(value)))


def _select(
    signature: inspect.Signature, available: dict[str, Any], group: RewardGroup | None = None
) -> dict[str, Any]:
    """Return the entries of `available` that the function wants.

    Args:
        group: whose columns the function gets as well if it names them.

    Raises:
        LookupError: it wants something that is not available.
    """
    named = available if group is None else {**group.columns, "messages": group.messages, **available}
    parameters = signature.parameters.values()
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC and parameter.name not in named
    ]
    if missing:
        raise LookupError(
            f"the function wants {', '.join(map(repr, missing))}, but the data has no such column;"
            f" it has {', '.join(sorted(named))}. If it is of another form than it seems, set python.style"
        )
    wanted = {name: named[name] for name in signature.parameters if name in named}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return {**{name: value for name, value in available.items() if name not in _ON_REQUEST}, **wanted}
    return wanted
