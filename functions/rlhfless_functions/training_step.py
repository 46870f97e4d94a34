"""One training step: epochs, of minibatches with an optimizer update each, of micro-batches with a pass each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from rlhfless_functions.algorithms.diagnostics import Statistics, add_statistics, sampler_statistics, summarize
from rlhfless_functions.algorithms.objectives import Loss, critic_loss, policy_loss
from rlhfless_functions.api import LearnRequest
from rlhfless_functions.modeling import body_of, response_log_probs, response_values
from rlhfless_functions.optimizers import ModelOptimizer, NonFiniteGradientError, schedule_factor
from rlhfless_functions.passes import Block
from rlhfless_functions.settings import CriticSettings
from rlhfless_functions.shared_prompts import SharedPrompts, can_share_prompts
from rlhfless_functions.task import TaskError
from rlhfless_functions.training_batch import MicroBatch, TrainingBatch
from rlhfless_functions.training_state import TrainingState, autocast
from rlhfless_functions.weights import CriticModel


@dataclass
class Course:
    """How one model's learning went over the optimizer updates of a step."""

    losses: list[float] = field(default_factory=list)
    """Of each update."""
    gradient_norms: list[float] = field(default_factory=list)
    """Of each update, before clipping."""


@dataclass
class StepReport:
    """How a step went."""

    learning_rate: float
    policy: Course = field(default_factory=Course)
    critic: Course = field(default_factory=Course)
    statistics: Statistics = field(default_factory=dict)
    """Over all epochs and micro-batches."""
    tokens: int = 0
    """Tokens that went through a forward and backward pass of the policy or, while it is frozen, of the critic."""
    shared_tokens: int = 0
    """Prompt tokens that did not, because another sample of the group had brought them."""

    def count(self, batch: TrainingBatch, block: Block) -> None:
        """Take note of what a block's passes compute."""
        rows = [row for run in block.runs for row in run]
        whole = sum(len(batch.samples[row].prompt_tokens) for row in rows)
        prompts = sum(len(batch.samples[row].prompt_tokens) for row in block.prompts) if block.prompts else whole
        self.tokens += prompts + sum(batch.lengths[row] for row in rows)
        self.shared_tokens += whole - prompts

    def summary(self) -> dict[str, float]:
        """The statistics' summary."""
        return summarize(self.statistics)


def train_step(
    state: TrainingState, batch: TrainingBatch, request: LearnRequest, step: int, check: Callable[[], None]
) -> StepReport:
    """Take one training step, in place; what comes out depends on the arguments alone.

    Args:
        state: after step − 1; after an exception it is of no use any more.
        batch: of this step.
        request: the settings; its own step may be a later one, in a replay.
        step: the training step, from 1.
        check: called before every micro-batch; raises to break off.

    Raises:
        TaskError: `non_finite_loss`, naming the step; `data_invalid`, if the batch lacks the old log-probabilities or
            the critic's numbers.
    """
    algorithm, settings = request.algorithm, request.batch_settings
    minibatches = [
        minibatch
        for epoch in range(algorithm.epochs)
        for minibatch in batch.minibatches(settings.minibatch_samples, request.seed, step, epoch)
    ]
    _check_numbers(batch, state, len(minibatches), step)
    factor = schedule_factor(request.optimizer, step, request.total_steps)
    critic_warmup = (algorithm.critic or CriticSettings()).warmup_steps if state.critic is not None else 0
    report = StepReport(learning_rate=0.0 if step <= critic_warmup else request.optimizer.learning_rate * factor)
    share = request.learning.share_prompts and can_share_prompts(body_of(state.policy))
    # Only the dropout of an adapter draws from it; a replay must draw the same.
    torch.manual_seed((request.seed * 1_000_003 + step) % 2**63)
    for minibatch in minibatches:
        blocks = batch.passes(minibatch, settings.microbatch_tokens, share_prompts=share)
        if not blocks:
            continue
        scale = 1 / batch.normalizer(minibatch, request.sampling.max_response_tokens)
        policy_total = torch.zeros((), device=state.device)
        critic_total = torch.zeros((), device=state.device)
        for block in blocks:
            prompts = [batch.samples[row].prompt_tokens for row in block.prompts]
            report.count(batch, block)
            policy_prompts = critic_prompts = None
            if prompts and step > critic_warmup:
                policy_prompts = _shared(request, state.policy, prompts)
            if prompts and state.critic is not None:
                critic_prompts = _shared(request, state.critic, prompts)
            for rows in block.runs:
                check()
                micro_batch = batch.select(block, rows, state.device)
                if step > critic_warmup:
                    with autocast(request, state.policy):
                        loss = _policy_loss(state, micro_batch, request, policy_prompts)
                    policy_total += _backward(loss, scale, report)
                elif "old_log_probs" in micro_batch.numbers:
                    _compare_with_sampler(micro_batch, report)
                if state.critic is not None:
                    with autocast(request, state.critic):
                        loss = _critic_loss(state, micro_batch, request, critic_prompts)
                    critic_total += _backward(loss, scale, report)
            for shared in (policy_prompts, critic_prompts):
                if shared is not None:
                    shared.backward()
        if step > critic_warmup:
            _update(
                state.policy_optimizer,
                factor,
                float(policy_total),
                report.policy,
                f"step {step}: the policy's",
                "optimizer.learningRate",
            )
        if state.critic_optimizer is not None:
            _update(
                state.critic_optimizer,
                factor,
                float(critic_total),
                report.critic,
                f"step {step}: the critic's",
                "algorithm.critic.learningRate",
            )
    state.version = step
    return report


def _check_numbers(batch: TrainingBatch, state: TrainingState, updates: int, step: int) -> None:
    needed: Sequence[str] = ("old_log_probs",) if updates > 1 else ()
    if state.critic is not None:
        needed = (*needed, "values", "returns")
    for name in needed:
        if any(batch.counted) and name not in batch:
            raise TaskError(
                "data_invalid",
                f"step {step}: the batch has no {name}, which {updates} optimizer updates with this algorithm need:"
                " prepare the step again",
            )


def _shared(
    request: LearnRequest, model: PreTrainedModel | PeftModel | CriticModel, prompts: Sequence[Sequence[int]]
) -> SharedPrompts:
    with autocast(request, model):
        return SharedPrompts(body_of(model), prompts)


def _policy_loss(state: TrainingState, batch: MicroBatch, request: LearnRequest, prompts: SharedPrompts | None) -> Loss:
    log_probs, entropy = response_log_probs(
        state.policy,
        batch.tokens,
        request.sampling.temperature,
        prompts=prompts,
        entropy=True,
        entropy_gradient=request.algorithm.entropy_coefficient > 0,
        chunk_tokens=request.learning.logits_chunk_tokens,
    )
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


def _critic_loss(state: TrainingState, batch: MicroBatch, request: LearnRequest, prompts: SharedPrompts | None) -> Loss:
    assert state.critic is not None
    return critic_loss(
        request.algorithm,
        values=response_values(state.critic, batch.tokens, prompts),
        old_values=batch.numbers["values"],
        returns=batch.numbers["returns"],
        mask=batch.tokens.response_mask,
    )


def _compare_with_sampler(batch: MicroBatch, report: StepReport) -> None:
    """While the policy rests, nothing but preparation has passed it."""
    gap = sampler_statistics(batch.numbers["old_log_probs"], batch.numbers["log_probs"], batch.tokens.response_mask)
    report.statistics = add_statistics(report.statistics, gap)


def _backward(loss: Loss, scale: float, report: StepReport) -> torch.Tensor:
    scaled = loss.total * scale
    scaled.backward()
    report.statistics = add_statistics(report.statistics, loss.statistics)
    return scaled.detach()


def _update(optimizer: ModelOptimizer, factor: float, loss: float, course: Course, whose: str, rate: str) -> None:
    try:
        if not math.isfinite(loss):
            raise NonFiniteGradientError(f"the loss is {loss}")
        course.gradient_norms.append(optimizer.update(factor))
    except NonFiniteGradientError as error:
        raise TaskError(
            "non_finite_loss",
            f"{whose} update failed: {error}. The weights of the step before stand;"
            f" lower {rate}, or look for extreme rewards or log-probabilities in the step's batch",
        ) from error
    course.losses.append(loss)
