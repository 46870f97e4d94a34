"""Jobs for all tests: the smallest document, and the file of a job that a laptop trains in seconds."""

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from rlhfless_functions.api import ExportRequest, Stage, TaskKey, WeightsReference
from rlhfless_functions.settings import ModelSettings
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob


def document(name: str = "job", /, **spec: Any) -> dict[str, Any]:
    """Return the smallest job's document, with parts of its spec replaced; None takes a part away."""
    parts = {
        "model": {"source": "org/model"},
        "rewards": [{"name": "right", "math": {}}],
        "data": {"source": "data.jsonl"},
        "steps": 10,
        **copy.deepcopy(spec),
    }
    given = {part: value for part, value in parts.items() if value is not None}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": given}


def job(name: str = "job", /, **spec: Any) -> RLHFJob:
    """Return `document` as a job."""
    return RLHFJob.model_validate(document(name, **spec))


def small_job(name: str = "job", /, **spec: Any) -> dict[str, Any]:
    """Return the document of a job of a few short steps, an instance-second of which costs 1."""
    parts = {
        "model": {"source": "./model"},
        "batch": {"promptsPerStep": 4, "samplesPerPrompt": 2},
        "prices": {"instanceHour": "3600"},
        "steps": 3,
    }
    return document(name, **{**parts, **spec})


TINY_REWARD = '''
import os

def reward(prompts, completions, ground_truth, **columns):
    """The share of a completion's characters that are digits, a little more for the right one."""
    return [
        (sum(c.isdigit() for c in completion) + completion.count(str(answer))) / max(1, len(completion))
        for completion, answer in zip(completions, ground_truth)
    ]
'''


def export_request(
    part: str = "export", *, stage: Stage = "learning", source: str = "m", **given: Any
) -> ExportRequest:
    """Return a request that says little: of all stages' requests an export's has the fewest fields."""
    whole: dict[str, Any] = {
        "key": TaskKey(job_uid="u", step=1, stage=stage, part=part, attempt=0),
        "result": "r",
        "model": ModelSettings(source=source, dtype="float32"),
        "weights": WeightsReference(version=0, uri=source),
        "destination": "d",
        "model_card": "",
    }
    return ExportRequest(**{**whole, **given})


def write_tiny_job(place: Path, tiny_model: Path, /, name: str = "tiny", **overrides: Any) -> Path:
    """Write the file of a job of a few short steps on 12 prompts, and what it names, below a folder.

    Args:
        overrides: parts of the spec, which are merged with the others deeply.
    """
    folder = place / name
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(TINY_REWARD)
    prompts = [{"prompt": f"{first}+{second}=", "ground_truth": first} for first in range(4) for second in range(3)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    spec: dict[str, Any] = {
        "model": {"source": str(tiny_model), "dtype": "float32"},
        "data": {"source": "train.jsonl"},
        "rewards": [{"name": "digits", "python": {"file": "reward.py"}}],
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.01}},
        "sampling": {"maxPromptTokens": 16, "maxResponseTokens": 24},
        "batch": {"promptsPerStep": 4, "samplesPerPrompt": 4, "minibatchSamples": 8},
        "optimizer": {"learningRate": 1.0e-3},
        "steps": 3,
        "planning": {"policy": "even"},
        "generation": {"instances": {"min": 1, "max": 2}},
        "artifacts": {"uri": str(place / "runs")},
        "prices": {"instanceHour": "1.00"},
    }
    _merge(spec, overrides)
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(document(name, **spec)))
    return file


def _merge(base: dict[str, Any], overrides: dict[str, Any]) -> None:
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
