"""`rlhfless try-reward`: score responses with a job's rewards, without training."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlhfless_functions.api.reward_trial import GivenResponse, RewardTrial, RewardTrialResult
from rlhfless_operator.errors import UserError
from rlhfless_operator.formatting import format_number
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.functions_process import ask_functions

_SHOWN_CHARACTERS = 60


class TrialError(UserError):
    """Nothing could be scored."""


def make_trial(
    job: RLHFJob, responses: Path | None, *, prompts: int, samples: int, row: int | None, evaluation: bool
) -> RewardTrial:
    """Make the request to the functions.

    Args:
        job: the job, with resolved paths.
        responses: a file of responses; None to sample some.
        prompts: number of the data's first prompts to answer, if responses are sampled.
        samples: responses to each.
        row: row of the prompt for responses that name none; if None, they belong to the data's prompts one by one.
        evaluation: use the evaluation's data, rewards and sampling.

    Raises:
        TrialError: the file can't be read, the job has no evaluation, or only an environment can give a reward.
    """
    spec = job.spec
    if evaluation and spec.evaluation is None:
        raise TrialError("--evaluation: the job has no spec.evaluation; add it, or remove the option")
    rewards = spec.evaluation_rewards if evaluation else spec.rewards
    for reward in rewards:
        if reward.environment is not None:
            raise TrialError(
                f"reward '{reward.name}' is the score of the job's environment, and try-reward plays no episodes;"
                " use rlhfless try-environment, or remove it from a copy of the job to try the other rewards"
            )
    return RewardTrial(
        model=spec.model,
        data=spec.evaluation.data if evaluation and spec.evaluation else spec.data,
        rewards=rewards,
        sampling=spec.evaluation_sampling if evaluation else spec.sampling,
        seed=spec.seed,
        total_steps=spec.steps or 1,
        responses=[] if responses is None else read_responses(responses, row),
        prompts=prompts,
        samples=samples,
    )


def read_responses(path: Path, row: int | None) -> list[GivenResponse]:
    """Read the responses of a file: JSON objects with `response` and optionally `row` or `prompt`, or lines of text.

    Args:
        path: a JSONL file by its name, otherwise text.
        row: row of the prompt, for responses that name none.

    Raises:
        TrialError: the file can't be read; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrialError(f"--responses: {path} can't be read: {error}; name a file of text or JSONL") from error
    are_objects = path.suffix.lower() in (".jsonl", ".ndjson", ".json")
    found = [
        _object(f"{path}, line {number}", line, row) if are_objects else _text(f"{path}, line {number}", line, row)
        for number, line in enumerate(lines, start=1)
        if line.strip() or not are_objects
    ]
    if not found:
        raise TrialError(f"--responses: {path} is empty; write one response per line")
    return found


def _text(place: str, line: str, row: int | None) -> GivenResponse:
    return GivenResponse(place=place, response=line, row=row)


def _object(place: str, line: str, row: int | None) -> GivenResponse:
    try:
        content: Any = json.loads(line)
    except ValueError as error:
        raise TrialError(f"{place} is not JSON ({error}); write one object per line, or name the file .txt") from error
    if isinstance(content, str):
        return _text(place, content, row)
    if not isinstance(content, dict) or not isinstance(content.get("response"), str):
        raise TrialError(f'{place} has no response; write {{"response": "…"}}, and "row" or "prompt" with it')
    known = {name: content.pop(name) for name in ("response", "row", "prompt", "finish_reason") if name in content}
    if known.get("row") is None and known.get("prompt") is None:
        known["row"] = row
    try:
        return GivenResponse(place=place, columns=content, **known)
    except ValidationError as error:
        fault = error.errors()[0]
        raise TrialError(f"{place}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error


def run_trial(trial: RewardTrial) -> RewardTrialResult:
    """Score in a process of the functions.

    Raises:
        FunctionsMissingError: torch and other packages are not installed.
        TrialError: nothing could be scored.
    """
    result = RewardTrialResult.model_validate_json(ask_functions("try_reward", trial, "scoring", TrialError))
    if result.error is not None:
        raise TrialError(result.error)
    return result


def faults(result: RewardTrialResult) -> list[str]:
    """Return the reasons why the rewards can't be used for training, one sentence each; empty if they can."""
    found = [reward.error for reward in result.rewards if reward.error is not None]
    if not found and all(response.reward is None for response in result.responses):
        found.append("no response has a reward: for each of them, no term with a weight gave a score")
    return found


def view(result: RewardTrialResult) -> Group:
    """Return a table of responses with their terms, and one of rewards with their times."""
    names = [reward.name for reward in result.rewards]
    responses = Table(box=None, pad_edge=False)
    for title in ("row", "response", "tokens", *names, "reward"):
        responses.add_column(title, justify="left" if title == "response" else "right")
    for each in result.responses:
        row = "–" if each.row is None else str(each.row)
        ended = "" if each.finish_reason == "stop" else " (truncated)"
        cells = [_number(each.terms.get(name)) for name in names]
        responses.add_row(row, Text(_brief(each.response)), f"{each.tokens}{ended}", *cells, _number(each.reward))
    rewards = Table(box=None, pad_edge=False)
    for title in ("term", "kind", "weight", "scored", "mean", "least", "most", "calls", "first call", "later calls"):
        rewards.add_column(title, justify="left" if title in ("term", "kind") else "right", no_wrap=True)
    for reward in result.rewards:
        scores = [score for each in result.responses if (score := each.terms.get(reward.name)) is not None]
        spread = (sum(scores) / len(scores), min(scores), max(scores)) if scores else (None, None, None)
        rewards.add_row(
            reward.name, reward.kind, format_number(reward.weight), f"{len(scores)} of {len(result.responses)}",
            *map(_number, spread), str(reward.calls), _time(reward.first_seconds), _time(reward.mean_seconds),
        )  # fmt: skip
    return Group(responses, Text(), rewards)


def _number(value: float | None) -> str:
    return "none" if value is None else format_number(value)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _brief(text: str) -> str:
    """Return a response on one line, including its end, where the answer usually is."""
    line = repr(text)[1:-1]
    if len(line) <= _SHOWN_CHARACTERS:
        return line
    half = (_SHOWN_CHARACTERS - 1) // 2
    return f"{line[:half]}…{line[-half:]}"
