"""One training step: epochs of minibatches, each with an optimizer update, made of micro-batches, each with a pass."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch

from rlhfless_functions.algorithms.aggregation import normalizer
from rlhfless_functions.algorithms.diagnostics import sampler_statistics
from rlhfless_functions.api import LearnRequest
from rlhfless_functions.data.rollouts import PreparedSample
from rlhfless_functions.learning.batch import MicroBatch, TrainingBatch
from rlhfless_functions.learning.offload import move
from rlhfless_functions.learning.optimizers import schedule_factor
from rlhfless_functions.learning.state import TrainingState
from rlhfless_functions.learning.step_report import StepReport
from rlhfless_functions.learning.trained_models import TrainedModel, trained_critic, trained_policy
from rlhfless_functions.model.forward import body_of
from rlhfless_functions.model.micro_batches import WHOLE, Block, plan_micro_batches
from rlhfless_functions.model.shared_prompts import SharedPrompts, can_share_prompts
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import CriticSettings


def train_step(
    state: TrainingState, batch: TrainingBatch, request: LearnRequest, step: int, check: Callable[[], None]
) -> StepReport:
    """Take one training step in place. The result depends only on the arguments.

    Args:
        state: state after step − 1; it is unusable after an exception.
        batch: batch of this step.
        request: the settings. When steps are repeated, it may be the request of a later step.
        step: the training step, from 1.
        check: called before every micro-batch; it raises an error to stop the step.

    Raises:
        TaskError: `non_finite_loss`, naming the step.
    """
    size = request.batch_settings.minibatch_samples
    # Dropout is fixed for a pass, and therefore all epochs with dropout have the same minibatches.
    first, *others = (
        batch.minibatches(size, request.seed, step, epoch, keep=_drops(request))
        for epoch in range(request.algorithm.epochs)
    )
    later = first if others else first[1:]
    taken = _Step(state, request, step, check)
    if batch.needs_values:
        taken.remember_values(batch, first)
    for minibatch in chain(first, *others):
        scale = 1 / batch.normalizer(minibatch, request.sampling.max_response_tokens)
        if taken.accumulate(batch, minibatch, scale):
            if later and "old_log_probs" not in batch:
                taken.remember_policy(batch, later)
            taken.update()
    return taken.end()


class StepInPieces:
    """A training step of one optimizer update, whose batch arrives in pieces.

    Only the whole batch determines the divisor of the losses, so the gradients are divided at the end. The result
    depends on the pieces and their order, never on the time of their arrival.

    Args:
        state: state after step − 1; it is unusable after an exception.
        request: see `train_step`.
        step: the training step, from 1.
    """

    def __init__(self, state: TrainingState, request: LearnRequest, step: int) -> None:
        self.state = state
        self.request = request
        self.samples: list[PreparedSample] = []
        """Samples of all pieces so far."""
        self.factors: list[float] = []
        """The factor of each."""
        self.pieces = 0
        """Number of pieces so far."""
        self.seconds = 0.0
        """Seconds that earlier attempts at the step took for these pieces."""
        self._number = step
        self._taken = _Step(state, request, step, _unchecked)
        self._counted: list[int] = []

    def add(self, samples: Sequence[PreparedSample], check: Callable[[], None], factors: Sequence[float] = ()) -> None:
        """Accumulate the gradients of a piece.

        Args:
            samples: of the piece.
            check: called before every micro-batch; it raises an error to stop the step, which is then unusable.
            factors: see `TrainingBatch`.

        Raises:
            TaskError: see `train_step`; `data_invalid`, if the piece lacks the critic's numbers.
        """
        piece = TrainingBatch(samples, self.request.algorithm, self._number, factors)
        if piece.needs_values:
            raise TaskError(
                "data_invalid",
                f"step {self._number}: a step in pieces has no values of the learner's own critic, and preparation left"
                " them out; prepare the step again",
            )
        self._taken.check = check
        self._taken.accumulate(piece, range(len(samples)), 1.0)
        self._counted += piece.counted
        self.samples += samples
        self.factors += factors or [1.0] * len(samples)
        self.pieces += 1

    def end(self) -> StepReport:
        """Take the update.

        Raises:
            TaskError: see `train_step`.
        """
        if any(self._counted):
            aggregation, longest = self.request.algorithm.aggregation, self.request.sampling.max_response_tokens
            assert aggregation is not None
            self._taken.divide(normalizer(self._counted, aggregation, longest))
            self._taken.update()
        return self._taken.end()

    def move(self, device: torch.device) -> None:
        """Move everything that the step holds to a device, including its gradients, bit for bit."""
        move(self.state, device)
        self._taken.move(device)


class _Step:
    """A training step under way."""

    def __init__(self, state: TrainingState, request: LearnRequest, step: int, check: Callable[[], None]) -> None:
        self._state, self._request, self._step = state, request, step
        self.check = check
        self._passes_left = 0
        """Passes of the gradients that are being accumulated, on every rank."""
        self._share_prompts = _shares_prompts(state, request)
        frozen = _critic_warmup(state, request)
        self.report = StepReport(learning_rate=0.0)
        self._policy = self._critic = None
        if step > frozen:
            # The schedule counts the policy's own updates.
            factor = schedule_factor(request.optimizer, step - frozen, request.total_steps - frozen)
            self.report.learning_rate = request.optimizer.learning_rate * factor
            self._policy = trained_policy(state, request, self.report.policy, factor)
        if state.critic is not None:
            factor = schedule_factor(request.optimizer, step, request.total_steps)
            self._critic = trained_critic(state, request, self.report.critic, factor)
        self._trained = [model for model in (self._policy, self._critic) if model is not None]

    def accumulate(self, batch: TrainingBatch, chosen: Sequence[int], scale: float) -> bool:
        """Add the gradients of samples' losses times a scale. Returns whether any of the samples is in the loss."""
        blocks, idle = self._passes(batch, chosen)
        self._passes_left = sum(len(block.runs) for block in blocks) + idle
        for block in blocks:
            self.report.count(batch, block)
            # Sharded gradients are means over the ranks.
            self._add_gradients(batch, block, scale * self._state.ranks.size)
        chosen = batch.in_loss(chosen)
        for _ in range(idle):
            self._keep_step(batch, chosen[:1])
        return bool(chosen)

    def remember_policy(self, batch: TrainingBatch, minibatches: Iterable[Sequence[int]]) -> None:
        """Compute the batch's old log-probabilities: those of the policy before the step's first update.

        Before the first update every ratio must be 1. That holds only if both of its sides come from the same
        arithmetic: number format, kernels and micro-batches. So the learner computes them with its own policy, in the
        same passes in which it will learn from the samples. It keeps autograd on, because a compiled layer computes
        differently without it. Preparation can't compute them, because it has only the published, rounded weights.

        Args:
            batch: the samples, each at most once in the minibatches.
            minibatches: the minibatches in which the learner will learn from them.
        """
        if self._policy is not None:
            batch.set_old_log_probs(self._ask(self._policy, batch, minibatches))

    def remember_values(self, batch: TrainingBatch, minibatches: Iterable[Sequence[int]]) -> None:
        """Compute the batch's values, with the critic before the step's first update, and with them its advantages.

        They come from the same arithmetic as the first update's, so no value is clipped there; see `remember_policy`.

        Args:
            batch: the samples, each once in the minibatches.
            minibatches: the minibatches in which the learner will learn from them.
        """
        assert self._critic is not None
        batch.set_values(self._ask(self._critic, batch, minibatches))

    def divide(self, by: float) -> None:
        """Divide everything accumulated so far."""
        for model in self._trained:
            model.divide(by)

    def update(self) -> None:
        """Take the optimizers' steps with the accumulated gradients, and clear them."""
        for model in self._trained:
            model.update(self._step)

    def move(self, device: torch.device) -> None:
        """Move the tensors that are not part of the state."""
        for model in self._trained:
            model.move(device)
        self.report.move(device)

    def end(self) -> StepReport:
        """Return the report of the step, over all ranks."""
        self._state.version = self._step
        self.report.add_up(self._state.ranks)
        return self.report

    def _passes(self, batch: TrainingBatch, chosen: Sequence[int]) -> tuple[list[Block], int]:
        """Return this rank's passes over a minibatch's samples in the loss, and the number of further passes of the
        rank with the most."""
        state = self._state
        chosen = batch.in_loss(chosen)
        mine = [chosen[place] for place in state.ranks.deal([batch.tokens(row) for row in chosen])]
        budget = self._request.batch_settings.microbatch_tokens
        blocks = plan_micro_batches(batch.samples, mine, budget, share=self._share_prompts, packed=state.packed)
        passes = sum(len(block.runs) for block in blocks)
        return blocks, max(state.ranks.all(passes)) - passes

    def _ask(
        self, model: TrainedModel, batch: TrainingBatch, minibatches: Iterable[Sequence[int]]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield samples of all ranks, and the model's numbers for their response tokens, sample by sample."""
        found = [asked for minibatch in minibatches for asked in self._ask_minibatch(model, batch, minibatch)]
        model.unit.forget_whole()
        return chain(*self._state.ranks.all(found))

    def _ask_minibatch(
        self, model: TrainedModel, batch: TrainingBatch, minibatch: Sequence[int]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield the same for this rank's samples of a minibatch."""
        blocks, idle = self._passes(batch, minibatch)
        for block in blocks:
            prompts = [batch.samples[row].prompt_tokens for row in block.prompts]
            self._seed_dropout(batch, block.prompts)
            shared = model.share(prompts) if prompts else None
            for rows in block.runs:
                yield rows, self._answer(model, batch, block, rows, shared)
        for _ in range(idle):
            self._answer(model, batch, WHOLE, batch.in_loss(minibatch)[:1], None)

    def _answer(
        self,
        model: TrainedModel,
        batch: TrainingBatch,
        block: Block,
        rows: Sequence[int],
        prompts: SharedPrompts | None,
    ) -> torch.Tensor:
        self.check()
        self._seed_dropout(batch, rows)
        micro_batch = batch.select(block, rows, self._state.device, packed=self._state.packed)
        return model.answer(micro_batch, prompts)[micro_batch.tokens.response_mask].cpu()

    def _add_gradients(self, batch: TrainingBatch, block: Block, scale: float) -> None:
        """Pass a block: shared prompts forward, each micro-batch forward and backward, shared prompts backward."""
        prompts = [batch.samples[row].prompt_tokens for row in block.prompts]
        self._seed_dropout(batch, block.prompts)
        shared = [model.share(prompts) if prompts else None for model in self._trained]
        for rows in block.runs:
            self.check()
            self._seed_dropout(batch, rows)
            micro_batch = batch.select(block, rows, self._state.device, packed=self._state.packed)
            if self._policy is None:
                self._compare_with_sampler(micro_batch)
            self._begin_pass()
            for model, its_prompts in zip(self._trained, shared, strict=True):
                self.report.add(model.add_gradients(micro_batch, its_prompts, scale))
        for its_prompts in shared:
            if its_prompts is not None:
                its_prompts.backward()

    def _keep_step(self, batch: TrainingBatch, rows: Sequence[int]) -> None:
        """Make an empty pass, because the busiest rank makes one more: all ranks gather each layer together."""
        self.check()
        micro_batch = batch.select(WHOLE, rows, self._state.device, packed=self._state.packed)
        self._begin_pass()
        for model in self._trained:
            model.add_nothing(micro_batch)

    def _begin_pass(self) -> None:
        """Let the ranks exchange their gradients after the last pass."""
        self._passes_left -= 1
        for model in self._trained:
            model.unit.wait_with_gradients(self._passes_left > 0)

    def _seed_dropout(self, batch: TrainingBatch, rows: Sequence[int]) -> None:
        """Fix the random numbers of the next pass, which only an adapter's dropout uses.

        They depend on the step and on the samples of the pass. So a pass that computes old log-probabilities drops the
        same as the pass that learns from these samples, and their ratios show only what was learnt in between. A
        repeated step draws the same numbers again.
        """
        if _drops(self._request):
            identity = [self._request.seed, self._step, *(batch.samples[row].key for row in rows)]
            digest = hashlib.blake2b(repr(identity).encode(), digest_size=7).digest()
            torch.manual_seed(int.from_bytes(digest, "little"))

    def _compare_with_sampler(self, batch: MicroBatch) -> None:
        """Compare preparation's log-probabilities with the sampler's. While the policy is frozen, the step has none."""
        numbers, mask = batch.numbers, batch.tokens.response_mask
        if "prepared_log_probs" in numbers:
            self.report.add(sampler_statistics(numbers["prepared_log_probs"], numbers["log_probs"], mask))


def _unchecked() -> None:
    """Never stop."""


def _drops(request: LearnRequest) -> bool:
    """Return whether the adapter has dropout."""
    return request.model.lora is not None and request.model.lora.dropout > 0


def _critic_warmup(state: TrainingState, request: LearnRequest) -> int:
    """Return the number of first steps in which only the critic learns."""
    return (request.algorithm.critic or CriticSettings()).warmup_steps if state.critic is not None else 0


def _shares_prompts(state: TrainingState, request: LearnRequest) -> bool:
    """Return whether the prompt of a group may be computed once."""
    # Sharded layers compute together on all ranks. And padded responses look their prompts' states up by the layer's
    # number, so every layer would be compiled separately.
    able = state.ranks.size == 1 and (state.packed or not state.compiled)
    return request.learning.share_prompts and able and can_share_prompts(body_of(state.policy))
