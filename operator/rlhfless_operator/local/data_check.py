"""`rlhfless validate --data`: a job's datasets as training reads them."""

import json
from collections.abc import Iterator

from pydantic import BaseModel

from rlhfless_functions.api import Purpose
from rlhfless_functions.api.data_check import DataCheck, DataCheckResult, ShownPrompt
from rlhfless_functions.settings import DataSettings
from rlhfless_operator.errors import UserError
from rlhfless_operator.formatting import clipped, printable
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.functions_process import FunctionsMissingError, ask_functions, check_functions
from rlhfless_operator.local.served_environment import with_server

_SHOWN_CHARACTERS = 2000
"""Longest prompt for people, in characters."""


class DataCheckError(UserError):
    """The data could not be checked."""


class CheckedData(BaseModel):
    """A dataset of a job, and what was found in it."""

    field: str
    """Path of its section in the document: `spec.data` or `spec.evaluation.data`."""
    result: DataCheckResult


def check_that_data_can_be_read() -> None:
    """Make sure that this machine has what makes prompts.

    Raises:
        FunctionsMissingError: it is not installed; the message says what to install.
    """
    try:
        check_functions()
    except FunctionsMissingError as error:
        raise FunctionsMissingError(f"--data reads prompts as training does, but {error}") from error


def questions(job: RLHFJob, prompts: int) -> dict[Purpose, DataCheck]:
    """Return the question for each dataset of a job; none if it is a rehearsal, which takes its prompts from a trace.

    Args:
        job: the job, with resolved paths.
        prompts: number of each source's first prompts to show.
    """
    spec = job.spec
    if spec.rehearsal is not None:
        return {}
    datasets: dict[Purpose, DataSettings] = {"training": spec.data}
    if spec.evaluation is not None:
        datasets["evaluation"] = spec.evaluation.data
    return {
        purpose: DataCheck(
            model=spec.model,
            data=data,
            sampling=spec.sampling,
            environment=spec.environment,
            rewards=spec.rewards if purpose == "training" else spec.evaluation_rewards,
            most_dropped=spec.limits.dropped_prompts,
            prompts=prompts,
        )
        for purpose, data in datasets.items()
    }


def check_data(job: RLHFJob, prompts: int) -> list[CheckedData]:
    """Read a job's datasets in a process of the functions.

    Args:
        job: the job, with resolved paths.
        prompts: number of each source's first prompts to show.

    Raises:
        FunctionsMissingError: torch and other packages are not installed.
        EnvironmentServerError: the environment's server does not start.
        DataCheckError: the process ended without an answer.
    """
    server = job.spec.environment.server if job.spec.environment is not None else None
    if server is not None and server.command is None:
        # It runs on a cluster only: the prompts are read without what it adds.
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"environment": None})})
    return with_server(job, lambda served: _check(served, prompts))


def _check(job: RLHFJob, prompts: int) -> list[CheckedData]:
    found = []
    for purpose, question in questions(job, prompts).items():
        answer = ask_functions("check_data", question, "checking", DataCheckError)
        result = DataCheckResult.model_validate_json(answer)
        if purpose == "training":
            result = result.model_copy(update={"faults": result.faults + _too_few(job, result)})
        found.append(CheckedData(field="spec.data" if purpose == "training" else "spec.evaluation.data", result=result))
    return found


def _too_few(job: RLHFJob, result: DataCheckResult) -> list[str]:
    """Return the fault that the training data is not enough for a step."""
    per_step, counts = job.spec.batch.prompts_per_step, result.counts
    if counts is None or (usable := counts.rows - counts.left_out) >= per_step:
        return []
    why = f" ({counts.left_out} rows were left out: {counts.reasons})" if counts.left_out else ""
    fewer = f"the data has {usable} usable prompts, fewer than batch.promptsPerStep, {per_step}{why}"
    return [f"{fewer}; add prompts, or lower batch.promptsPerStep"]


def describe(checked: CheckedData) -> Iterator[str]:
    """Yield lines for people: the counts, the notes and the first prompts. Faults are not among them."""
    counts = checked.result.counts
    if counts is not None:
        dropped = f"; dropped: {counts.reasons}" if counts.left_out else ""
        yield f"  {checked.field}: {counts.rows - counts.left_out} prompts of {counts.rows} rows{dropped}"
        if counts.without_ground_truth:
            first = counts.first.get("without_ground_truth", "")
            yield f"  {checked.field}: {counts.without_ground_truth} prompts have no ground truth (first {first})"
        for note in counts.notes:
            yield f"  {checked.field}: {printable(note)}"
    for prompt in checked.result.prompts:
        yield from _prompt(prompt)


def _prompt(prompt: ShownPrompt) -> Iterator[str]:
    kind = "chat" if prompt.is_chat else "plain text"
    truth = clipped(json.dumps(prompt.ground_truth, ensure_ascii=False), 80)
    known = "" if prompt.ground_truth is None else f", ground truth {truth}"
    yield printable(f"  row {prompt.row}, {prompt.source} ({kind}, {prompt.tokens} tokens{known}):")
    for line in _brief(prompt.text).split("\n"):
        yield f"    | {printable(line)}"


def _brief(text: str) -> str:
    """Return a text without the middle, if it is very long: the template is at its beginning and its end."""
    half = _SHOWN_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n[… {left_out} characters left out …]\n{text[-half:]}"
