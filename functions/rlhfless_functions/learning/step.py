"""One training step: epochs, of minibatches with an optimizer update each, of micro-batches with a pass each."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from rlhfless_functions.algorithms.aggregation import normalizer
from rlhfless_functions.algorithms.diagnostics import (
    Moments,
    Statistics,
    add_statistics,
    sampler_statistics,
    summarize,
)
from rlhfless_functions.algorithms.objectives import Loss, critic_loss, policy_loss
from rlhfless_functions.api import LearnRequest
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.learning.batch import MicroBatch, TrainingBatch
from rlhfless_functions.learning.optimizers import ModelOptimizer, NonFiniteGradientError, schedule_factor
from rlhfless_functions.learning.state import TrainingState, autocast
from rlhfless_functions.model.forward import body_of, response_log_probs, response_values
from rlhfless_functions.model.micro_batches import WHOLE, Block
from rlhfless_functions.model.shared_prompts import SharedPrompts, can_share_prompts
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import CriticSettings
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

    def add_up(self, ranks: Ranks) -> None:
        """Take in what the other ranks' passes came to."""
        parts = ranks.all((self.tokens, {name: moments.data.cpu() for name, moments in self.statistics.items()}))
        if ranks.size > 1:
            self.tokens = sum(tokens for tokens, _ in parts)
            self.statistics = {}
            for _, statistics in parts:
                own = {name: Moments(data) for name, data in statistics.items()}
                self.statistics = add_statistics(self.statistics, own)

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
    settings = request.batch_settings
    minibatches = [
        minibatch
        for epoch in range(request.algorithm.epochs)
        for minibatch in batch.minibatches(settings.minibatch_samples, request.seed, step, epoch)
    ]
    _check_numbers(batch, state, len(minibatches), step)
    taken = _Step(state, request, step, check)
    for minibatch in minibatches:
        scale = 1 / batch.normalizer(minibatch, request.sampling.max_response_tokens)
        if taken.accumulate(batch, minibatch, scale):
            taken.update()
    return taken.end()


def train_step_in_pieces(
    state: TrainingState,
    pieces: Iterable[TrainingBatch],
    request: LearnRequest,
    step: int,
    check: Callable[[], None],
) -> StepReport:
    """Take one training step of one optimizer update whose batch comes in pieces, one after the other.

    The losses are divided by what only the whole batch says, so that this is done to the gradients, at the end. What
    comes out depends on the pieces and their order, never on when they come.

    Args:
        state: after step − 1; after an exception it is of no use any more.
        pieces: of this step; whatever they raise breaks off.
        request: see `train_step`.
        step: the training step, from 1.
        check: called before every micro-batch; raises to break off.

    Raises:
        TaskError: see `train_step`.
    """
    taken = _Step(state, request, step, check)
    counted: list[int] = []
    some = False
    for piece in pieces:
        _check_numbers(piece, state, 1, step)
        counted += piece.counted
        some = taken.accumulate(piece, range(len(piece.samples)), 1.0) or some
    if some:
        assert request.algorithm.aggregation is not None
        taken.divide(normalizer(counted, request.algorithm.aggregation, request.sampling.max_response_tokens))
        taken.update()
    return taken.end()


class _Step:
    """A training step under way: what has been accumulated for its next optimizer update."""

    def __init__(self, state: TrainingState, request: LearnRequest, step: int, check: Callable[[], None]) -> None:
        critic_warmup = (request.algorithm.critic or CriticSettings()).warmup_steps if state.critic is not None else 0
        self._state, self._request, self._step, self._check = state, request, step, check
        self._policy_learns = step > critic_warmup
        self._factor = schedule_factor(request.optimizer, step, request.total_steps)
        # Sharded layers pass together on all ranks. And padded responses read their prompts' states by the layer's
        # number, for which each would be compiled by itself.
        able = state.ranks.size == 1 and (state.packed or not state.compiled)
        self._share = request.learning.share_prompts and able and can_share_prompts(body_of(state.policy))
        rate = request.optimizer.learning_rate * self._factor
        self.report = StepReport(learning_rate=rate if self._policy_learns else 0.0)
        self._policy_total = torch.zeros((), device=state.device)
        self._critic_total = torch.zeros((), device=state.device)
        # Only the dropout of an adapter draws from it; a replay must draw the same.
        torch.manual_seed((request.seed * 1_000_003 + step) % 2**63)

    def accumulate(self, batch: TrainingBatch, chosen: Sequence[int], scale: float) -> bool:
        """Add the gradients of samples' losses times a scale; whether any of them is in the loss."""
        state, request, report, ranks = self._state, self._request, self.report, self._state.ranks
        chosen = batch.in_loss(chosen)
        mine = [chosen[place] for place in ranks.deal([batch.tokens(row) for row in chosen])]
        budget = request.batch_settings.microbatch_tokens
        blocks = batch.passes(mine, budget, share_prompts=self._share, packed=state.packed)
        passes = sum(len(block.runs) for block in blocks)
        spare = ranks.most(passes) - passes
        # Sharded gradients are means over the ranks.
        scale *= ranks.size
        for block in blocks:
            prompts = [batch.samples[row].prompt_tokens for row in block.prompts]
            report.count(batch, block)
            policy_prompts = critic_prompts = None
            if prompts and self._policy_learns:
                policy_prompts = _shared(request, state, state.policy, prompts)
            if prompts and state.critic is not None:
                critic_prompts = _shared(request, state, state.critic, prompts)
            for rows in block.runs:
                self._check()
                micro_batch = batch.select(block, rows, state.device, packed=state.packed)
                if self._policy_learns:
                    with autocast(request, state.policy):
                        loss = _policy_loss(state, micro_batch, request, policy_prompts)
                    self._policy_total += _backward(loss, scale, report)
                elif "old_log_probs" in micro_batch.numbers:
                    _compare_with_sampler(micro_batch, report)
                if state.critic is not None:
                    with autocast(request, state.critic):
                        loss = _critic_loss(state, micro_batch, request, critic_prompts)
                    self._critic_total += _backward(loss, scale, report)
            for shared in (policy_prompts, critic_prompts):
                if shared is not None:
                    shared.backward()
        for _ in range(spare):
            self._check()
            micro_batch = batch.select(WHOLE, chosen[:1], state.device, packed=state.packed)
            _keep_step(state, micro_batch, request, policy=self._policy_learns)
        return bool(chosen)

    def divide(self, by: float) -> None:
        """Divide everything that has been accumulated."""
        for model in (self._state.policy, self._state.critic):
            for parameter in model.parameters() if model is not None else ():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / by)
        self._policy_total /= by
        self._critic_total /= by

    def update(self) -> None:
        """Take the optimizers' steps with what has been accumulated, and begin anew."""
        state, who = self._state, f"step {self._step}: the "
        if self._policy_learns:
            loss, course = self._mean(self._policy_total), self.report.policy
            _update(state.policy_optimizer, self._factor, loss, course, f"{who}policy's", "optimizer.learningRate")
        if state.critic_optimizer is not None:
            loss, course, rate = self._mean(self._critic_total), self.report.critic, "algorithm.critic.learningRate"
            _update(state.critic_optimizer, self._factor, loss, course, f"{who}critic's", rate)
        self._policy_total = torch.zeros((), device=state.device)
        self._critic_total = torch.zeros((), device=state.device)

    def end(self) -> StepReport:
        """How the step went, on all ranks."""
        self._state.version = self._step
        self.report.add_up(self._state.ranks)
        return self.report

    def _mean(self, total: torch.Tensor) -> float:
        ranks = self._state.ranks
        return sum(ranks.all(float(total))) / ranks.size


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
    request: LearnRequest,
    state: TrainingState,
    model: PreTrainedModel | PeftModel | CriticModel,
    prompts: Sequence[Sequence[int]],
) -> SharedPrompts:
    with autocast(request, model):
        return SharedPrompts(body_of(model), prompts, packed=state.packed)


def _policy_loss(state: TrainingState, batch: MicroBatch, request: LearnRequest, prompts: SharedPrompts | None) -> Loss:
    log_probs, entropy = state.policy_unit(
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
    assert state.critic_unit is not None
    return critic_loss(
        request.algorithm,
        values=state.critic_unit(lambda critic: response_values(critic, batch.tokens, prompts)),
        old_values=batch.numbers["values"],
        returns=batch.numbers["returns"],
        mask=batch.tokens.response_mask,
    )


def _keep_step(state: TrainingState, batch: MicroBatch, request: LearnRequest, *, policy: bool) -> None:
    """Pass as often as the rank that has most to do: layers are gathered from all ranks, or from none."""
    if policy:
        with autocast(request, state.policy):
            loss = _policy_loss(state, batch, request, None)
        (loss.total * 0).backward()
    if state.critic is not None:
        with autocast(request, state.critic):
            loss = _critic_loss(state, batch, request, None)
        (loss.total * 0).backward()


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
