"""`rlhfless probe`: find the models, send the request to the functions, and report errors."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from rlhfless_functions import artifacts
from rlhfless_functions.api.probe import Probe, ProbedModel, ProbeResult
from rlhfless_functions.settings import DataSettings, ModelSettings, SamplingSettings
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.reading.validation import parse_job
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.local.functions_process import ask_functions
from rlhfless_operator.platforms.local.gpus import visible_gpus
from rlhfless_operator.records.folder import JobFolder

DType = Literal["float32", "bfloat16"]
Found = tuple[ProbedModel, RLHFJob | None]
"""A model, and the job that made it."""

_STEP = re.compile(r"step-0*(\d+)")
_OPTIONS = {
    "model.tokenizer": "--tokenizer",
    "model.chatTemplate": "a chat template in the tokenizer's folder",
    "data.source": "--data",
    "data.promptColumn": "--prompt-column",
    "sampling.maxPromptTokens": "--max-prompt-tokens",
    "sampling.maxResponseTokens": "--max-tokens",
}
"""The command's options for the job's fields that the functions name."""


class ProbeError(UserError):
    """Nothing could be measured."""


def make_probe(
    models: Sequence[str],
    *,
    data: str | None,
    prompt_column: str | None,
    tokenizer: str | None,
    dtype: DType | None,
    temperature: float | None,
    max_prompt_tokens: int | None,
    max_tokens: int | None,
    **others: Any,
) -> Probe:
    """Make the request to the functions. None stands for the job's value if a run is probed, else for the default.

    Args:
        models: folders or hub names of models, runs' folders, checkpoints.
        data: file of prompts.
        prompt_column: column of the prompt in the data.
        tokenizer: source of the tokenizer; by default the model's.
        dtype: number format of the model.
        temperature: temperature of the draws.
        max_prompt_tokens: longest prompt; longer ones are skipped.
        max_tokens: longest response.
        others: see `Probe`.

    Raises:
        ProbeError: a model or the data is missing or unclear.
    """
    given = {"tokenizer": tokenizer, "dtype": dtype}
    changes = {name: value for name, value in given.items() if value is not None}
    found = [each for name in models for each in _find(name, changes)]
    spec = next((job.spec for _, job in found if job is not None), None)
    if data is not None:
        prompts = DataSettings(source=data)
    elif spec is not None:
        prompts = spec.data
    else:
        raise ProbeError("--data: missing; name a file of prompts, because only a run has its own")
    sampling = SamplingSettings() if spec is None else spec.sampling
    return Probe(
        models=[each for each, _ in found],
        data=prompts if prompt_column is None else prompts.model_copy(update={"prompt_column": prompt_column}),
        temperature=sampling.temperature if temperature is None else temperature,
        max_prompt_tokens=max_prompt_tokens or sampling.max_prompt_tokens,
        max_response_tokens=max_tokens or (None if spec is None else sampling.max_response_tokens),
        stop=sampling.stop,
        **others,
    )


def run_probe(asked: Probe) -> ProbeResult:
    """Run the probe in a process of the functions.

    Raises:
        FunctionsMissingError: torch and other packages are not installed.
        ProbeError: nothing could be measured.
    """
    try:
        result = ProbeResult.model_validate_json(ask_functions("probe", asked, "probing", ProbeError))
    except ValidationError as error:
        raise ProbeError(f"a measured value is not a number: {error}") from error
    if result.error is not None:
        raise ProbeError(in_options(result.error))
    return result


def in_options(message: str) -> str:
    """Replace names of a job's fields in a message by the options."""
    for field, option in _OPTIONS.items():
        message = message.replace(field, option)
    return message


def _find(given: str, changes: dict[str, Any]) -> Iterator[Found]:
    """Return the models that a name stands for. A run stands for its first model and its checkpoints."""
    here = artifacts.local_path(given)
    uri = str(here.resolve()) if here is not None and here.exists() else given.rstrip("/")
    step = _step(uri.rpartition("/")[2])
    if _has(uri, "job.yaml"):
        job = _job(uri)
        model = job.spec.model.model_copy(update=changes)
        files = artifacts.list_files(artifacts.join(uri, "checkpoints"))
        steps = {step for file in files if file.endswith("/state.json") and (step := _step(file)) is not None}
        yield ProbedModel(name="step 0", step=0, model=model), job
        for step in sorted(steps):
            checkpoint = JobFolder(uri).checkpoint(step)
            yield ProbedModel(name=f"step {step}", step=step, model=model, checkpoint=checkpoint), job
    elif _has(uri, "state.json"):
        root = uri.rpartition("/")[0].rpartition("/")[0]
        if not _has(root, "job.yaml"):
            raise ProbeError(
                f"{given} is a checkpoint outside its run, whose job.yaml names the model; name it as"
                " RUN/checkpoints/step-…"
            )
        job = _job(root)
        model = job.spec.model.model_copy(update=changes)
        yield ProbedModel(name=f"step {step}", step=step, model=model, checkpoint=uri), job
    elif _has(uri, "adapter_config.json"):
        raise ProbeError(f"{given} is an adapter without its model; name the run's checkpoint of that step instead")
    elif here is not None and here.exists() and not _has(uri, "config.json"):
        raise ProbeError(
            f"{given} is not a model, run or checkpoint: it has no config.json, job.yaml or state.json; name a Hugging"
            " Face folder, a run's folder such as runs/my-job, or RUN/checkpoints/step-…"
        )
    else:
        # A CPU has no fast bfloat16.
        model = ModelSettings(source=given, dtype="bfloat16" if visible_gpus() else "float32")
        yield ProbedModel(name=given, step=step, model=model.model_copy(update=changes)), None


def _job(root: str) -> RLHFJob:
    uri = artifacts.join(root, "job.yaml")
    return parse_job(artifacts.read_bytes(uri).decode(), uri)


def _step(text: str) -> int | None:
    found = _STEP.search(text)
    return int(found[1]) if found else None


def _has(folder: str, file: str) -> bool:
    # A name on the hub looks like a relative path.
    return artifacts.exists(artifacts.join(folder, file))
