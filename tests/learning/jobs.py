"""Jobs as a learner sees them: their batches, their requests, and what it publishes."""

import random
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from rlhfless_functions.api import BatchReference, LearnRequest, LearnResult, SampleTask, TaskKey, WeightsReference
from rlhfless_functions.data.rollouts import PreparedSample, VersionSpan, write_prepared
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    CriticSettings,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    SamplingSettings,
)
from tests.processes import children_with

PPO = AlgorithmSettings(name="ppo", critic=CriticSettings(learning_rate=1e-3, warmup_steps=1))
LEFT_OUT = {"values": None, "advantages": None, "returns": None}
"""What preparation leaves to the learner's critic."""


def context() -> TaskContext:
    return TaskContext(emit=lambda event: None)


def processes_beside() -> list[psutil.Process]:
    """The learning processes beside this one."""
    return children_with("rlhfless_functions.learning.rank_process")


class StoppedContext(TaskContext):
    """Told to drain when it is asked for the n-th time."""

    def __init__(self, polls: int) -> None:
        super().__init__(emit=lambda event: None)
        self.polls = polls

    @property
    def stop_reason(self) -> Any:
        self.polls -= 1
        return "drain" if self.polls < 0 else None


def samples_of(step: int, **given: Any) -> list[PreparedSample]:
    draw = random.Random(step)

    def numbers(length: int, mean: float, spread: float) -> list[float]:
        return [draw.gauss(mean, spread) for _ in range(length)]

    samples = []
    for number in range(8):
        length = draw.randint(1, 10)
        sample = {
            "prompt": number // 2,
            "index": number % 2,
            "prompt_tokens": [draw.randint(2, 50) for _ in range(3)],
            "response_tokens": [draw.randint(2, 50) for _ in range(length)],
            "log_probs": numbers(length, -4, 0.1),
            "finish_reason": "stop",
            "versions": [VersionSpan(step - 1, 0, length)],
            "reward": float(number % 2),
            "old_log_probs": numbers(length, -4, 0.1),
            "reference_log_probs": numbers(length, -4, 0.1),
            "values": numbers(length, 0, 0.1),
            "advantages": numbers(length, 0, 1),
            "returns": numbers(length, 0.5, 0.5),
        }
        samples.append(PreparedSample(**{**sample, **given}))
    return samples


class Job:
    """A job's store and its requests."""

    def __init__(self, folder: Path, model: ModelSettings, algorithm: AlgorithmSettings, **given: Any) -> None:
        self.folder, self.prepared, self.given = folder, given.pop("prepared", {}), given
        self.model, self.algorithm = model, algorithm.resolved()
        self.initial = WeightsReference(version=0, uri=model.source)
        self.weights = [self.initial]

    def batch(self, step: int) -> BatchReference:
        part = self.folder / "batches" / f"{step}.parquet"
        samples = samples_of(step, **self.prepared)
        if not part.exists():
            write_prepared(str(part), samples)
        tasks = [SampleTask(prompt=sample.prompt, index=sample.index) for sample in samples]
        return BatchReference(step=step, parts=[str(part)], samples=tasks)

    def request(self, step: int, where: str = "undisturbed", checkpoint_step: int = 0, **given: Any) -> LearnRequest:
        """The request of a step whose outcome is published below `where`."""
        whole = {
            "key": TaskKey(job_uid="job", step=step, stage="learning", part="learn", attempt=0),
            "result": str(self.folder / where / f"{step}.json"),
            "model": self.model,
            "initial": self.initial,
            "base": self.weights[step - 1],
            "batch": self.batch(step),
            "checkpoint": self.checkpoint(checkpoint_step) if checkpoint_step else None,
            "checkpoint_step": checkpoint_step,
            "replay": [self.batch(before) for before in range(checkpoint_step + 1, step)],
            "algorithm": self.algorithm,
            "optimizer": OptimizerSettings(learning_rate=1e-3, warmup_steps=1, schedule="linear", weight_decay=0.1),
            "batch_settings": BatchSettings(prompts_per_step=4, samples_per_prompt=2, minibatch_samples=4),
            "sampling": SamplingSettings(max_response_tokens=16),
            "learning": LearningSettings(),
            "total_steps": 10,
            "seed": 7,
            "publish": str(self.folder / where / f"weights-{step}"),
            "publish_critic": (
                str(self.folder / where / f"critic-{step}") if self.algorithm.advantage == "gae" else None
            ),
            **self.given,
            **given,
        }
        return LearnRequest(**whole)

    def checkpoint(self, step: int) -> str:
        return str(self.folder / "undisturbed" / f"checkpoint-{step}")

    def undisturbed(self, steps: int) -> list[LearnResult]:
        """Let one learner take the first steps, with a checkpoint of each."""
        learner, results = Learner(), []
        for step in range(1, steps + 1):
            result = learner.run(self.request(step, save_checkpoint=self.checkpoint(step)), context())
            assert isinstance(result, LearnResult)
            self.weights.append(result.weights)
            results.append(result)
        return results

    def published(self, step: int, where: str = "undisturbed") -> dict[str, torch.Tensor]:
        """Every tensor of what a step published."""
        return {
            f"{folder}/{file.name}/{name}": tensor
            for folder in (f"weights-{step}", f"critic-{step}")
            for file in sorted((self.folder / where / folder).glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }


def assert_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some
    assert some.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def job_of(folder: Path, model: Path, **given: Any) -> Job:
    """A job on a model; `dtype` and `lora` are the model's, `algorithm` is the job's, `prepared` its samples', and the
    rest is in each request."""
    settings = ModelSettings(source=str(model), dtype=given.pop("dtype", "float32"), lora=given.pop("lora", None))
    return Job(folder, settings, given.pop("algorithm", AlgorithmSettings()), **given)


JOBS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm": PPO},
    "ppo, values of its own critic": {"algorithm": PPO, "prepared": LEFT_OUT},
    "muon": {"optimizer": OptimizerSettings(name="muon", learning_rate=1e-3)},
    "bfloat16": {"dtype": "bfloat16"},
    "adapter with dropout": {"dtype": "bfloat16", "lora": LoraSettings(rank=2, dropout=0.2)},
    "two epochs, one minibatch": {
        "algorithm": AlgorithmSettings(epochs=2),
        "batch_settings": BatchSettings(prompts_per_step=4, samples_per_prompt=2),
    },
}
