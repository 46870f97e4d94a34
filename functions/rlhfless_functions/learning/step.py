"""One training step: epochs, of minibatches with an optimizer update each, of micro-batches with a pass each."""

from collections.abc import Callable, Iterable, Sequence

import torch

from rlhfless_functions.algorithms.aggregation import normalizer
from rlhfless_functions.algorithms.diagnostics import sampler_statistics
from rlhfless_functions.api import LearnRequest
from rlhfless_functions.learning.batch import MicroBatch, TrainingBatch
from rlhfless_functions.learning.optimizers import schedule_factor
from rlhfless_functions.learning.state import TrainingState
from rlhfless_functions.learning.step_report import StepReport
from rlhfless_functions.learning.trained_models import trained_critic, trained_policy
from rlhfless_functions.model.forward import body_of
from rlhfless_functions.model.micro_batches import WHOLE, Block
from rlhfless_functions.model.shared_prompts import can_share_prompts
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import CriticSettings


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
    """A training step under way."""

    def __init__(self, state: TrainingState, request: LearnRequest, step: int, check: Callable[[], None]) -> None:
        self._state, self._request, self._step, self._check = state, request, step, check
        self._factor = schedule_factor(request.optimizer, step, request.total_steps)
        self._share_prompts = _shares_prompts(state, request)
        policy_is_frozen = step <= _critic_warmup(state, request)
        rate = request.optimizer.learning_rate * self._factor
        self.report = StepReport(learning_rate=0.0 if policy_is_frozen else rate)
        self._policy = None if policy_is_frozen else trained_policy(state, request, self.report.policy)
        self._critic = None if state.critic is None else trained_critic(state, request, self.report.critic)
        self._trained = [model for model in (self._policy, self._critic) if model is not None]
        # Only the dropout of an adapter draws from it; a replay must draw the same.
        torch.manual_seed((request.seed * 1_000_003 + step) % 2**63)

    def accumulate(self, batch: TrainingBatch, chosen: Sequence[int], scale: float) -> bool:
        """Add the gradients of samples' losses times a scale; whether any of them is in the loss."""
        state, ranks = self._state, self._state.ranks
        chosen = batch.in_loss(chosen)
        mine = [chosen[place] for place in ranks.deal([batch.tokens(row) for row in chosen])]
        budget = self._request.batch_settings.microbatch_tokens
        blocks = batch.passes(mine, budget, share_prompts=self._share_prompts, packed=state.packed)
        passes = sum(len(block.runs) for block in blocks)
        most_passes = ranks.most(passes)
        for block in blocks:
            self.report.count(batch, block)
            # Sharded gradients are means over the ranks.
            self._add_gradients(batch, block, scale * ranks.size)
        for _ in range(most_passes - passes):
            self._keep_step(batch, chosen[:1])
        return bool(chosen)

    def divide(self, by: float) -> None:
        """Divide everything that has been accumulated."""
        for model in self._trained:
            model.divide(by)

    def update(self) -> None:
        """Take the optimizers' steps with what has been accumulated, and begin anew."""
        for model in self._trained:
            model.update(self._step, self._factor)

    def end(self) -> StepReport:
        """How the step went, on all ranks."""
        self._state.version = self._step
        self.report.add_up(self._state.ranks)
        return self.report

    def _add_gradients(self, batch: TrainingBatch, block: Block, scale: float) -> None:
        """Pass a block: its prompts where they are shared, each micro-batch there and back, and the prompts back."""
        prompts = [batch.samples[row].prompt_tokens for row in block.prompts]
        shared = [model.share(prompts) if prompts else None for model in self._trained]
        for rows in block.runs:
            self._check()
            micro_batch = batch.select(block, rows, self._state.device, packed=self._state.packed)
            if self._policy is None:
                self._compare_with_sampler(micro_batch)
            for model, its_prompts in zip(self._trained, shared, strict=True):
                self.report.add(model.add_gradients(micro_batch, its_prompts, scale))
        for its_prompts in shared:
            if its_prompts is not None:
                its_prompts.backward()

    def _keep_step(self, batch: TrainingBatch, rows: Sequence[int]) -> None:
        """Pass as often as the rank that has most to do: layers are gathered from all ranks, or from none."""
        self._check()
        micro_batch = batch.select(WHOLE, rows, self._state.device, packed=self._state.packed)
        for model in self._trained:
            model.add_nothing(micro_batch)

    def _compare_with_sampler(self, batch: MicroBatch) -> None:
        """While the policy is frozen, nothing but preparation has passed it."""
        numbers, mask = batch.numbers, batch.tokens.response_mask
        if "old_log_probs" in numbers:
            self.report.add(sampler_statistics(numbers["old_log_probs"], numbers["log_probs"], mask))


def _critic_warmup(state: TrainingState, request: LearnRequest) -> int:
    """First steps in which the critic learns alone."""
    return (request.algorithm.critic or CriticSettings()).warmup_steps if state.critic is not None else 0


def _shares_prompts(state: TrainingState, request: LearnRequest) -> bool:
    """Whether the prompt of a group may be computed once."""
    # Sharded layers pass together on all ranks. And padded responses read their prompts' states by the layer's
    # number, for which each would be compiled by itself.
    able = state.ranks.size == 1 and (state.packed or not state.compiled)
    return request.learning.share_prompts and able and can_share_prompts(body_of(state.policy))


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
