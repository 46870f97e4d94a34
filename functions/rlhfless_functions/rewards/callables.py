"""The function signatures of TRL and verl."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from rlhfless_functions.rewards.calls import Call, Scorer, is_async, plain_number
from rlhfless_functions.rewards.groups import RewardGroup

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def trl_scorer(function: Callable[..., Any]) -> Scorer:
    """Adapt TRL's form, `fn(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async.

    The function gets the keyword arguments that its signature names, or all of them if it takes `**kwargs`: one list
    per column of the dataset, `ground_truth`, `finish_reasons`, and TRL's `trainer_state` (its `global_step` only),
    `log_metric` and `log_extra` (which is accepted and ignored: there is no completions table here). Prompts and
    completions are text, or lists of chat messages if the dataset's prompt is one.
    """
    signature = inspect.signature(function)

    def score(group: RewardGroup, call: Call) -> Any:
        return function(**_select(signature, _trl_arguments(group, call)))

    return score


def verl_scorer(function: Callable[..., Any]) -> Scorer:
    """Adapt verl's form, `compute_score(data_source, solution_str, ground_truth, extra_info)`, sync or async.

    It is called once per response and returns a number or a dict with `score`, whose other numbers are logged.
    `data_source` and `extra_info` are columns of the dataset, or empty if it has none.
    """
    signature = inspect.signature(function)

    def results(group: RewardGroup) -> list[Any]:
        shared = {
            "data_source": group.columns.get("data_source", ""),
            "ground_truth": group.columns.get("ground_truth"),
            "extra_info": group.columns.get("extra_info") or {},
        }
        return [
            function(**_select(signature, {"solution_str": completion, **shared})) for completion in group.completions
        ]

    def score(group: RewardGroup, call: Call) -> list[float | None]:
        return [_verl_number(result, call) for result in results(group)]

    async def score_async(group: RewardGroup, call: Call) -> list[float | None]:
        return [_verl_number(result, call) for result in await asyncio.gather(*results(group))]

    return score_async if is_async(function) else score


def _trl_arguments(group: RewardGroup, call: Call) -> dict[str, Any]:
    chat = group.messages is not None
    completions = [
        [{"role": "assistant", "content": completion}] if chat else completion for completion in group.completions
    ]

    def log_metric(name: str, value: float) -> None:
        call.metrics.append((str(name), plain_number(value)))

    return {
        **{name: [value] * group.size for name, value in group.columns.items()},
        "prompts": [group.messages if chat else group.text] * group.size,
        "completions": completions,
        "completion_ids": group.completion_ids,
        "finish_reasons": group.finish_reasons,
        "trainer_state": SimpleNamespace(global_step=call.step),
        "log_metric": log_metric,
        "log_extra": lambda column, values: None,
    }


def _verl_number(result: Any, call: Call) -> float | None:
    if not isinstance(result, Mapping):
        return None if result is None else plain_number(result)
    if "score" not in result:
        raise TypeError(f"returned a dict without 'score' (it has {', '.join(map(str, result)) or 'nothing'})")
    for name, value in result.items():
        if name != "score" and isinstance(value, bool | int | float):
            call.metrics.append((str(name), float(value)))
    return None if result["score"] is None else plain_number(result["score"])


def _select(signature: inspect.Signature, available: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `available` that the function wants.

    Raises:
        LookupError: it wants something that is not available.
    """
    parameters = signature.parameters.values()
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC and parameter.name not in available
    ]
    if missing:
        raise LookupError(
            f"the function wants {', '.join(map(repr, missing))}, but the data has no such column;"
            f" it has {', '.join(sorted(available))}"
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return available
    return {name: available[name] for name in signature.parameters if name in available}
