"""Values and advantages that preparation leaves to the learner: they come from its critic before the first update."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions.api import LearnRequest
from rlhfless_functions.data.estimates import estimate_samples
from rlhfless_functions.data.rollouts import PreparedSample
from rlhfless_functions.learning import state as training_state
from rlhfless_functions.learning.batch import TrainingBatch
from rlhfless_functions.learning.state import TrainingState, initial_state
from rlhfless_functions.learning.step import train_step
from rlhfless_functions.learning.step_report import StepReport
from rlhfless_functions.model.micro_batches import WHOLE
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    CriticSettings,
    KlSettings,
    LearningSettings,
    ModelSettings,
    OptimizerSettings,
)
from tests.learning.jobs import LEFT_OUT
from tests.learning.steps import Recorder, assert_same_gradients, learn_request, ragged_samples
from tests.weights.random_models import token_values

torch.set_num_threads(1)

pytestmark = pytest.mark.usefixtures("warm_start")

CPU = torch.device("cpu")
FOUR_UPDATES = BatchSettings(prompts_per_step=4, samples_per_prompt=2, minibatch_samples=4, microbatch_tokens=40)
IN_REWARD = KlSettings(coefficient=0.2, placement="reward", estimator="k1")
COMPUTING: dict[str, dict[str, Any]] = {
    "padded": {"pack": "never"},
    "packed": {"pack": "always"},
    "prompts with each sample": {"share_prompts": False},
    "checkpointed": {"gradient_checkpointing": True},
}


def ppo(**given: Any) -> AlgorithmSettings:
    whole = {"gamma": 0.99, "gae_lambda": 0.9, "epochs": 2, "critic": CriticSettings(learning_rate=1e-2), **given}
    return AlgorithmSettings(name="ppo", **whole)


def step_of(folder: Path, **given: Any) -> LearnRequest:
    return learn_request(folder, **{"algorithm": ppo(), "batch_settings": FOUR_UPDATES, **given})


def with_a_head(state: TrainingState) -> TrainingState:
    """A critic that says something."""
    assert state.critic is not None
    with torch.no_grad():
        state.critic.score.weight.copy_(torch.linspace(-1, 1, state.critic.score.weight.numel()))
    return state


def values_alone(state: TrainingState, samples: Iterable[PreparedSample]) -> list[list[float]]:
    """The plain way: one row, no padding."""
    assert state.critic is not None
    found = []
    for sample in samples:
        with torch.no_grad():
            values = token_values(state.critic, torch.tensor([sample.prompt_tokens + sample.response_tokens]))[0]
        found.append(values[len(sample.prompt_tokens) - 1 : -1].tolist())
    return found


def prepared(
    samples: Iterable[PreparedSample], values: Iterable[list[float]], algorithm: AlgorithmSettings
) -> list[PreparedSample]:
    """What preparation would have made of samples with these values."""
    found = []
    for sample, its_values in zip(samples, values, strict=True):
        valued = replace(sample, values=its_values)
        estimate = estimate_samples([valued], algorithm)
        assert estimate.returns is not None
        advantages, returns = estimate.advantages[0].tolist(), estimate.returns[0].tolist()
        found.append(replace(valued, advantages=advantages, returns=returns))
    return found


def numbers_of(batch: TrainingBatch, name: str) -> list[list[float]]:
    return [
        batch.select(WHOLE, [row], CPU).numbers[name][0].tolist() if batch.counted[row] else []
        for row in range(len(batch.samples))
    ]


def take(
    request: LearnRequest, batch: TrainingBatch, step: int = 1
) -> tuple[StepReport, list[list[dict[str, torch.Tensor]]]]:
    """Take a step with such a critic; its report, and the gradients of each model's updates."""
    state = with_a_head(initial_state(request))
    assert state.critic is not None
    policy = state.policy_optimizer = Recorder(state.policy, request.optimizer)
    critic = state.critic_optimizer = Recorder(state.critic, request.optimizer)
    report = train_step(state, batch, request, step, lambda: None)
    return report, [policy.gradients, critic.gradients]


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("kl", [KlSettings(coefficient=0.0), IN_REWARD], ids=["no penalty", "penalty in the reward"])
def test_advantages_are_those_that_preparation_estimates_with_the_same_critic(
    tiny_model: Path, computing: str, kl: KlSettings
) -> None:
    request = step_of(tiny_model, algorithm=ppo(kl=kl), learning=LearningSettings(**COMPUTING[computing]))
    left = ragged_samples(**LEFT_OUT)
    left[5] = replace(left[5], mask=False, reward=None)
    factors = [1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    values = values_alone(with_a_head(initial_state(request)), left)
    expected = TrainingBatch(prepared(left, values, request.algorithm), request.algorithm, 1, factors)
    batch = TrainingBatch(left, request.algorithm, 1, factors)
    take(request, batch)
    for name in LEFT_OUT:
        for ours, theirs in zip(numbers_of(batch, name), numbers_of(expected, name), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("warmup", [0, 1])
def test_the_step_is_the_one_that_these_numbers_make(tiny_model: Path, warmup: int) -> None:
    """Bit for bit, in two epochs of two updates each."""
    request = step_of(tiny_model, algorithm=ppo(critic=CriticSettings(learning_rate=1e-2, warmup_steps=warmup)))
    left = ragged_samples(**LEFT_OUT)
    batch = TrainingBatch(left, request.algorithm, 1)
    report, gradients = take(request, batch)
    values = numbers_of(batch, "values")
    given = TrainingBatch(prepared(left, values, request.algorithm), request.algorithm, 1)
    assert not given.needs_values
    expected_report, expected = take(request, given)
    assert report.summary() == expected_report.summary()
    assert [len(updates) for updates in gradients] == [0 if warmup else 4, 4]
    for ours, theirs in zip(gradients, expected, strict=True):
        for some, same in zip(ours, theirs, strict=True):
            assert_same_gradients(some, same, tolerance=0)


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_value_has_moved_before_anything_is_learnt(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, computing: str, dtype: Any
) -> None:
    """The learning rate is so small that the critic of each update is the first's."""
    monkeypatch.setattr(training_state, "NARROWEST_ON_CPU", 1)
    request = step_of(
        tiny_model,
        model=ModelSettings(source=str(tiny_model), dtype=dtype),
        algorithm=ppo(critic=CriticSettings(learning_rate=1e-12, value_clip=1e-6)),
        optimizer=OptimizerSettings(learning_rate=1e-12),
        learning=LearningSettings(**COMPUTING[computing]),
    )
    report, _ = take(request, TrainingBatch(ragged_samples(**LEFT_OUT), request.algorithm, 1))
    summary = report.summary()
    assert summary["value_std"] > 0.01
    assert summary["value_clip"] == 0


def test_a_step_without_a_sample_in_the_loss_asks_nothing(tiny_model: Path) -> None:
    request = step_of(tiny_model)
    batch = TrainingBatch(ragged_samples(**LEFT_OUT, mask=False), request.algorithm, 1)
    report, gradients = take(request, batch)
    assert not batch.needs_values
    assert gradients == [[], []]
    assert report.tokens == 0
