"""The models that a step trains: the loss of a micro-batch, its gradients, and the optimizer's update."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from rlhfless_functions.algorithms.diagnostics import Statistics
from rlhfless_functions.algorithms.objectives import Loss, critic_loss, policy_loss
from rlhfless_functions.api import LearnRequest
from rlhfless_functions.distributed.sharding import Unit
from rlhfless_functions.learning.batch import MicroBatch
from rlhfless_functions.learning.optimizers import ModelOptimizer, NonFiniteGradientError
from rlhfless_functions.learning.state import TrainingState, autocast
from rlhfless_functions.learning.step_report import Course
from rlhfless_functions.model.forward import body_of, response_log_probs, response_values
from rlhfless_functions.model.shared_prompts import SharedPrompts
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.weights import CriticModel


@dataclass
class TrainedModel:
    """The policy or the critic, and the accumulated values for its next optimizer update."""

    name: str
    """Name for messages."""
    learning_rate_field: str
    """The job's field with its learning rate, for messages."""
    model: PreTrainedModel | PeftModel | CriticModel
    unit: Unit
    """The module that computes with the model."""
    optimizer: ModelOptimizer
    forward: Callable[[MicroBatch, SharedPrompts | None], Loss]
    """Computes the loss of a micro-batch. Its prompts may have been computed before."""
    numbers: Callable[[MicroBatch, SharedPrompts | None], torch.Tensor]
    """Computes the model's numbers for a micro-batch's response tokens [n, R]: log-probabilities or values."""
    state: TrainingState
    request: LearnRequest
    course: Course
    """The record of its updates."""
    factor: float
    """Share of the peak learning rate in this step."""
    _loss: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._loss = self._zero()

    def share(self, prompts: Sequence[Sequence[int]]) -> SharedPrompts:
        """Compute prompts once for all their responses."""
        with autocast(self.request, self.model):
            return SharedPrompts(body_of(self.model), prompts, packed=self.state.packed)

    def answer(self, batch: MicroBatch, prompts: SharedPrompts | None) -> torch.Tensor:
        """Return the model's numbers for a micro-batch's response tokens [n, R], as the loss would have them, but
        detached."""
        with autocast(self.request, self.model):
            return self.numbers(batch, prompts).detach()

    def add_gradients(self, batch: MicroBatch, prompts: SharedPrompts | None, scale: float) -> Statistics:
        """Add the gradients of a micro-batch's loss times a scale. Returns its statistics."""
        loss = self._loss_of(batch, prompts)
        self._loss += _backward(loss.total * scale)
        return loss.statistics

    def add_nothing(self, batch: MicroBatch) -> None:
        """Pass a micro-batch without changing the gradients."""
        _backward(self._loss_of(batch, None).total * 0)

    def move(self, device: torch.device) -> None:
        """Move the accumulated values, except for gradients, which move with their parameters."""
        self._loss = self._loss.to(device)

    def divide(self, by: float) -> None:
        """Divide the accumulated gradients and loss."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / by)
        self._loss /= by

    def update(self, step: int) -> None:
        """Take the optimizer's step with the accumulated gradients, and clear them.

        Args:
            step: the training step, for messages.

        Raises:
            TaskError: `non_finite_loss`.
        """
        ranks = self.state.ranks
        loss = sum(ranks.all(float(self._loss))) / ranks.size
        try:
            if not math.isfinite(loss):
                raise NonFiniteGradientError(f"the loss is {loss}")
            self.course.gradient_norms.append(self.optimizer.update(self.factor))
        except NonFiniteGradientError as error:
            raise TaskError(
                "non_finite_loss",
                f"step {step}: the {self.name}'s update failed: {error}. The previous step's weights are intact;"
                f" lower {self.learning_rate_field}, or look for extreme rewards or log-probabilities in the step's"
                " batch",
            ) from error
        self.course.losses.append(loss)
        self._loss = self._zero()

    def _loss_of(self, batch: MicroBatch, prompts: SharedPrompts | None) -> Loss:
        with autocast(self.request, self.model):
            return self.forward(batch, prompts)

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.state.device)


def trained_policy(state: TrainingState, request: LearnRequest, course: Course, factor: float) -> TrainedModel:
    """Return the policy as a step trains it, with this share of the peak learning rate."""
    return TrainedModel(
        name="policy",
        learning_rate_field="optimizer.learningRate",
        model=state.policy,
        unit=state.policy_unit,
        optimizer=state.policy_optimizer,
        forward=partial(_policy_loss, state, request),
        numbers=lambda batch, prompts: _log_probs(state, request, batch, prompts)[0],
        state=state,
        request=request,
        course=course,
        factor=factor,
    )


def trained_critic(state: TrainingState, request: LearnRequest, course: Course, factor: float) -> TrainedModel:
    """Return the critic, which must exist, as a step trains it, with this share of the peak learning rate."""
    assert state.critic is not None
    assert state.critic_unit is not None
    assert state.critic_optimizer is not None
    return TrainedModel(
        name="critic",
        learning_rate_field="algorithm.critic.learningRate",
        model=state.critic,
        unit=state.critic_unit,
        optimizer=state.critic_optimizer,
        forward=partial(_critic_loss, state.critic_unit, request),
        numbers=partial(_values, state.critic_unit),
        state=state,
        request=request,
        course=course,
        factor=factor,
    )


def _log_probs(
    state: TrainingState, request: LearnRequest, batch: MicroBatch, prompts: SharedPrompts | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies of a micro-batch's response tokens, [n, R] in nats, with autograd."""
    return state.policy_unit(
        lambda policy: response_log_probs(
            policy,
            batch.tokens,
            request.sampling.temperature,
            prompts=prompts,
            entropy=True,
            entropy_gradient=request.algorithm.entropy_coefficient > 0,
            chunk_tokens=request.learning.logits_chunk_tokens,
        )
    )


def _policy_loss(state: TrainingState, request: LearnRequest, batch: MicroBatch, prompts: SharedPrompts | None) -> Loss:
    log_probs, entropy = _log_probs(state, request, batch, prompts)
    return policy_loss(
        request.algorithm,
        log_probs=log_probs,
        advantages=batch.numbers["advantages"],
        mask=batch.tokens.response_mask,
        entropy=entropy,
        old_log_probs=batch.numbers.get("old_log_probs"),
        sampler_log_probs=batch.numbers.get("log_probs"),
        reference_log_probs=batch.numbers.get("reference_log_probs"),
    )


def _values(unit: Unit, batch: MicroBatch, prompts: SharedPrompts | None) -> torch.Tensor:
    """Return values of a micro-batch's response tokens, [n, R], with autograd."""
    return unit(lambda critic: response_values(critic, batch.tokens, prompts))


def _critic_loss(unit: Unit, request: LearnRequest, batch: MicroBatch, prompts: SharedPrompts | None) -> Loss:
    return critic_loss(
        request.algorithm,
        values=_values(unit, batch, prompts),
        old_values=batch.numbers["values"],
        returns=batch.numbers["returns"],
        mask=batch.tokens.response_mask,
    )


def _backward(loss: torch.Tensor) -> torch.Tensor:
    """Add the loss's gradients. Returns the loss."""
    loss.backward()
    return loss.detach()
