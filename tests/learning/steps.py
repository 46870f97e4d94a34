"""Single training steps on ragged samples, with the gradients of their updates."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlhfless_functions.api import BatchReference, LearnRequest, SampleTask, TaskKey, WeightsReference
from rlhfless_functions.data.rollouts import PreparedSample, VersionSpan
from rlhfless_functions.learning.batch import TrainingBatch
from rlhfless_functions.learning.optimizers import ModelOptimizer
from rlhfless_functions.learning.state import TrainingState, initial_state
from rlhfless_functions.learning.step import train_step
from rlhfless_functions.learning.step_report import StepReport
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    LearningSettings,
    ModelSettings,
    OptimizerSettings,
    SamplingSettings,
)

Gradients = dict[str, torch.Tensor]


def learn_request(folder: Path, **given: Any) -> LearnRequest:
    """A request of which only the settings matter here."""
    weights = WeightsReference(version=0, uri=str(folder))
    whole = {
        "key": TaskKey(job_uid="job", step=1, stage="learning", part="learn", attempt=0),
        "result": "unused",
        "model": ModelSettings(source=str(folder), dtype="float32"),
        "initial": weights,
        "base": weights,
        "batch": BatchReference(step=1, parts=["unused"], samples=[SampleTask(prompt=0, index=0)]),
        "algorithm": AlgorithmSettings(),
        "optimizer": OptimizerSettings(learning_rate=1e-3, max_gradient_norm=1e6),
        "batch_settings": BatchSettings(prompts_per_step=4, samples_per_prompt=2),
        "sampling": SamplingSettings(max_response_tokens=16),
        "learning": LearningSettings(),
        "total_steps": 10,
        "seed": 0,
        "publish": "unused",
        **given,
    }
    whole["algorithm"] = whole["algorithm"].resolved()
    return LearnRequest(**whole)


def ragged_samples(count: int = 8, seed: int = 0, **given: Any) -> list[PreparedSample]:
    draw = random.Random(seed)

    def numbers(length: int, mean: float, spread: float) -> list[float]:
        return [draw.gauss(mean, spread) for _ in range(length)]

    samples = []
    for number in range(count):
        length = draw.randint(1, 12)
        sample = {
            "prompt": number // 2,
            "index": number % 2,
            "prompt_tokens": [draw.randint(2, 50) for _ in range(2 + number // 2)],
            "response_tokens": [draw.randint(2, 50) for _ in range(length)],
            "log_probs": numbers(length, -4, 0.3),
            "finish_reason": "stop",
            "versions": [VersionSpan(0, 0, length)],
            "reward": float(number % 2),
            "old_log_probs": numbers(length, -4, 0.1),
            "reference_log_probs": numbers(length, -4, 0.2),
            "values": numbers(length, 0, 0.1),
            "advantages": numbers(length, 0, 1),
            "returns": numbers(length, 0.5, 0.5),
        }
        samples.append(PreparedSample(**{**sample, **given}))
    return samples


class Recorder(ModelOptimizer):
    """An optimizer that keeps the gradients of each update."""

    def __init__(self, model: torch.nn.Module, its: OptimizerSettings) -> None:
        super().__init__(model, its)
        self.model, self.gradients = model, list[Gradients]()

    def update(self, factor: float) -> float:
        self.gradients.append({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})
        return super().update(factor)


def take_step(
    request: LearnRequest, samples: list[PreparedSample], step: int = 1, check: Callable[[], None] = lambda: None
) -> tuple[TrainingState, StepReport, list[Gradients], list[Gradients]]:
    """Take one step from the initial state; also the gradients of the policy's and of the critic's updates."""
    state = initial_state(request)
    policy = state.policy_optimizer = Recorder(state.policy, request.optimizer)
    critic = None
    if state.critic is not None:
        critic = state.critic_optimizer = Recorder(state.critic, request.optimizer)
    report = train_step(state, TrainingBatch(samples, request.algorithm, step), request, step, check)
    return state, report, policy.gradients, critic.gradients if critic else []


def assert_same_gradients(some: Gradients, others: Gradients, tolerance: float = 1e-5) -> None:
    assert some.keys() == others.keys()
    largest = max(float(gradient.abs().max()) for gradient in others.values())
    assert largest > 0
    for name, gradient in some.items():
        assert float((gradient - others[name]).abs().max()) <= tolerance * largest, name
