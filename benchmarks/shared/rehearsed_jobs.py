"""Jobs that are rehearsed on emulated GPUs: the best case of the simulator, and any of its scenarios."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.traces import LengthStatistics, write_trace

GSM8K_LENGTHS = LengthStatistics(median=225, longest=2048, prompt_median=120, runaways=0.01)


def job_on_l40s(
    name: str,
    folder: Path,
    *,
    prompts: int,
    steps: int,
    time_scale: float,
    samples: int = 8,
    longest: int = GSM8K_LENGTHS.longest,
    startup_seconds: float = 2.0,
    **spec: Any,
) -> RLHFJob:
    """Return a job with Qwen2.5-3B on L40S that rehearses `trace.parquet` of its folder.

    Args:
        name: of the job.
        folder: of the trace and the artifacts.
        prompts: of a step.
        steps: of the job.
        time_scale: seconds here for each emulated second.
        samples: of a prompt.
        longest: most tokens of a response.
        startup_seconds: emulated seconds in which an instance starts.
        spec: further fields of the specification.
    """
    fields = {
        "model": {"source": "Qwen2.5-3B"},
        "data": {"source": str(folder)},
        "rewards": [{"name": "math", "math": {}}],
        "sampling": {"maxPromptTokens": 4096, "maxResponseTokens": longest},
        "batch": {"promptsPerStep": prompts, "samplesPerPrompt": samples},
        "steps": steps,
        "artifacts": {"uri": str(folder)},
        "rehearsal": {
            "trace": str(folder / "trace.parquet"), "gpu": "L40S", "startup": f"{startup_seconds:g}s",
            "weightLoad": "3s", "timeScale": time_scale,
        },
        **spec,
    }  # fmt: skip
    return RLHFJob.model_validate(_document(name, fields))


def job_of_scenario(
    scenario: Scenario,
    name: str,
    trace: Path,
    *,
    steps: int,
    learner_gpus: int,
    startup_seconds: float,
    time_scale: float,
) -> dict[str, Any]:
    """Return the document of a job with the lengths, the model and the GPUs of a scenario.

    The job learns by GRPO. Preparation asks a reference model, for the penalty on the distance to it.
    """
    fields = {
        "model": {"source": scenario.model.name},
        "data": {"source": str(trace)},
        "rewards": [{"name": "right", "math": {}}],
        "algorithm": {"name": "grpo", "kl": {"coefficient": 0.001}},
        "sampling": {"maxPromptTokens": 4096, "maxResponseTokens": scenario.lengths.longest},
        "batch": {"promptsPerStep": scenario.prompts_per_step, "samplesPerPrompt": scenario.samples_per_prompt},
        "steps": steps,
        "generation": {"pods": _gpus(scenario.gpus_per_instance)},
        "preparation": {"pods": _gpus(scenario.gpus_per_instance)},
        "learning": {"pods": _gpus(learner_gpus), "processes": learner_gpus},
        "rehearsal": {
            "trace": str(trace),
            "gpu": scenario.gpu.name,
            "gpus": scenario.gpus_per_instance,
            "startup": f"{startup_seconds:g}s",
            "weightLoad": f"{scenario.weight_load_seconds:g}s",
            "update": f"{scenario.update_seconds:g}s",
            "timeScale": time_scale,
        },
    }
    return _document(name, fields)


def write_trace_of(scenario: Scenario, steps: int, file: Path, seed: int) -> None:
    """Write responses' lengths of a scenario for so many steps."""
    epochs = -(-steps // scenario.steps_per_epoch)
    write_trace(file, replace(scenario, epochs=epochs).draw_trace(seed=seed))


def _document(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "rlhfless.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": name}, "spec": spec}


def _gpus(count: int) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}
