"""The asynchronous training loop: the learner takes one step after the other, while the next steps' groups are made.

Generation and preparation of later steps run while the learner works (`rollouts_ahead.py`). Weights that are published
during a step's generation are used from the next step on, or with `newWeights: switch` from the next token on. An
evaluation's actors have the next instances that become free.

Weights are published during the learning of the next step if its groups are there. The step is written down once they
are published, and before the next step is.
"""

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from rlhfless_functions.api import BatchReference, LearnResult
from rlhfless_operator.job.asynchrony import AsyncSpec
from rlhfless_operator.records.journal import StepBatch
from rlhfless_operator.training.asynchronous.free_groups import FreeGroups
from rlhfless_operator.training.asynchronous.rollouts_ahead import RolloutsAhead
from rlhfless_operator.training.asynchronous.step_choice import ChosenStep, StepChoice
from rlhfless_operator.training.journal.async_journal import AsyncJournal, TakenStep
from rlhfless_operator.training.journal.samples import kept_examples
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.affordable import check_affordable
from rlhfless_operator.training.stages.evaluation import evaluate, evaluation_due
from rlhfless_operator.training.stages.learning import Learning
from rlhfless_operator.training.stages.mismatch import check_mismatch
from rlhfless_operator.training.stages.rollout_record import groups_metrics
from rlhfless_operator.training.stages.state_saving import StateSaving, checkpoint_due


async def take_steps_asynchronously(run: TrainingRun, journal: StepJournal, settings: AsyncSpec) -> None:
    """Take all steps that are left.

    Raises:
        StageFailedError: a stage can't be done; the message is for the user.
        BudgetExhaustedError: the next step would take the job past its budget.
        LeaseLostError: another driver has the job.
    """
    if run.spec.evaluation and journal.status.step == 0 and not journal.records:
        check_affordable(run, journal, 0)
        await journal.commit(0, None, None, await evaluate(run, journal, 0, run.requests.initial), run.position)
    files = AsyncJournal(run.folder)
    async with RolloutsAhead(run, journal, files, settings) as ahead, LearnedSteps(run, journal, ahead, files) as steps:
        step = journal.status.step + 1
        while step <= run.prompts.total_steps:
            await steps.take(step)
            step += 1
        await ahead.finish()


@dataclass(frozen=True)
class _UnpublishedStep:
    """A step that is learnt, and whose weights may not be published yet."""

    batch: StepBatch
    learned: LearnResult
    learned_at: float
    """Time at which the learner finished it, in monotonic seconds."""


class LearnedSteps:
    """Takes one step after the other, and writes them down in their order.

    Args:
        run: the job in hand.
        journal: receives the finished steps.
        ahead: has the groups of the steps.
        files: receive the groups that each step takes.
    """

    def __init__(self, run: TrainingRun, journal: StepJournal, ahead: RolloutsAhead, files: AsyncJournal) -> None:
        self._run = run
        self._journal = journal
        self._ahead = ahead
        self._files = files
        self._choice: StepChoice | None = None
        """Choice of the newest step's groups."""
        self._unpublished: _UnpublishedStep | None = None
        """The step before, if it is not written down."""

    async def take(self, step: int) -> None:
        """Update the policy once, when the step's groups are there. Return once the step is written down, or once it is
        learnt and the next step can begin.

        Raises:
            StageFailedError: generation, preparation or learning can't be done.
            UnscorableError: too few of the samples have a reward.
            MismatchError: engine and learner disagree.
            BudgetExhaustedError: the step would take the job past its budget.
            LeaseLostError: another driver has the job.
        """
        run, journal, ahead = self._run, self._journal, self._ahead
        before, self._unpublished = self._unpublished, None
        began = time.monotonic() if before is None else before.learned_at
        journal.enter("generation")
        choice = await self._begun(step)
        waited = time.monotonic() - began
        journal.enter("learning")
        earlier = before.learned if before is not None else None
        saving, beside = StateSaving(run, journal), self._may_publish_beside(step)
        async with Learning(run, journal, step, saving, before=earlier, beside=beside) as learning:
            chosen = await self._learn(learning, choice, before)
            taken = chosen.taken
            if ahead.groups is not None:
                batch = step_of_groups(run, ahead, ahead.groups, taken, held_up=chosen.held_up)
            else:
                assert chosen.whole is not None
                batch = chosen.whole
            metrics = {**batch.metrics, "generation/staleness": taken.staleness}
            # Only the time that the learner waited held the step up.
            changes = {"batch": taken.batch, "metrics": metrics, "seconds": {"generation": waited}}
            batch = batch.model_copy(update=changes)
            if learning.is_publishing:
                learned_at = time.monotonic()
                self._choice = StepChoice(ahead, self._files, step + 1)
                if await learning.goes_on_until(self._choice.first):
                    self._unpublished = _UnpublishedStep(batch, await learning.let_go(), learned_at)
                    return
            learned = await learning.result()
        await self._write_down(batch, learned)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._choice is not None:
            await self._choice.end()

    def _may_publish_beside(self, step: int) -> bool:
        """Return whether the next step may begin before this one's weights are published."""
        total = self._run.prompts.total_steps
        due = checkpoint_due(self._run.spec, step, total) or evaluation_due(self._run.spec, step, total)
        # Groups that keep to their step may need the weights of this one.
        return self._ahead.groups is not None and not due

    async def _begun(self, step: int) -> StepChoice:
        """Return the choice of a step's groups, once a learner can begin."""
        choice = self._choice
        if choice is not None and choice.step == step:
            await asyncio.wait([choice.first])
            if choice.first.exception() is None:
                return choice
        # What failed before the step before was written down may succeed now.
        self._choice = choice = StepChoice(self._ahead, self._files, step)
        await asyncio.wait([choice.first])
        choice.first.result()
        return choice

    async def _learn(self, learning: Learning, choice: StepChoice, before: _UnpublishedStep | None) -> ChosenStep:
        """Begin a step, and wait until it is learnt. Write the step before down as soon as it is published. Return the
        step's groups."""
        writing = asyncio.create_task(self._write_earlier(learning, before)) if before is not None else None
        try:
            chosen = await self._begin(learning, choice, writing)
            if chosen.whole is not None:
                self._run.cost_model.measured(chosen.whole.lengths, self._run.prompts.tokens("training"))
                self._run.draft_history.generated(chosen.taken.step, chosen.whole.lengths)
            await learning.learnt()
        except Exception:
            # The step fails, but the one before may be published.
            if writing is not None:
                await writing
            raise
        else:
            if writing is not None:
                await writing
            return chosen
        finally:
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)

    async def _begin(self, learning: Learning, choice: StepChoice, writing: asyncio.Task[None] | None) -> ChosenStep:
        """Have the learner begin, and return the step's groups once all of them are written down."""
        follows = not choice.all.done()
        if follows:
            size = self._run.spec.batch.prompts_per_step * self._run.spec.batch.samples_per_prompt
            await learning.begin(BatchReference(step=choice.step, parts=[], samples=[], count=size))
            await _all_chosen(choice, learning)
            if choice.all.exception() is not None and writing is not None:
                # Once the step before is written down, more rollouts may fit the budget.
                await writing
                self._choice = choice = StepChoice(self._ahead, self._files, choice.step)
                await _all_chosen(choice, learning)
        chosen = choice.all.result()
        # Another driver may have been first, and a learner may have learnt from what it wrote.
        self._journal.learns_from(chosen.taken.batch)
        if not follows:
            await learning.begin(chosen.taken.batch)
        return chosen

    async def _write_earlier(self, learning: Learning, before: _UnpublishedStep) -> None:
        metrics = await learning.before_is_published()
        if metrics is not None:
            more = {"metrics": {**before.learned.metrics, **metrics}}
            await self._write_down(before.batch, before.learned.model_copy(update=more))

    async def _write_down(self, batch: StepBatch, learned: LearnResult) -> None:
        step = learned.weights.version
        check_mismatch(self._run.spec, step, {**batch.metrics, **learned.metrics})
        evaluation = await evaluate(self._run, self._journal, step, learned.weights)
        await self._journal.commit(step, batch, learned, evaluation, partial(_position, self._run, self._ahead, batch))
        self._ahead.advance()


async def _all_chosen(choice: StepChoice, learning: Learning) -> None:
    """Wait until all groups of a step are chosen, or can't be.

    Raises:
        StageFailedError: the learner that follows can't take the step.
    """
    learnt = asyncio.create_task(learning.learnt())
    try:
        await asyncio.wait([choice.all, learnt], return_when=asyncio.FIRST_COMPLETED)
        if learnt.done():
            learnt.result()
        await asyncio.wait([choice.all])
    finally:
        learnt.cancel()


def step_of_groups(
    run: TrainingRun, ahead: RolloutsAhead, groups: FreeGroups, taken: TakenStep, *, held_up: bool
) -> StepBatch:
    """Return the record of a step that learnt from groups of any rollouts: their metrics, and those of the generation
    since the step before."""
    found = groups.learnt(taken)
    plan, metrics = ahead.report()
    assert plan is not None, "a group is complete, so a rollout was planned"
    spec = run.spec
    # The emulated GPUs of a rehearsal do not say which version sampled a token.
    switches = spec.asynchronous is not None and spec.asynchronous.new_weights == "switch" and spec.rehearsal is None
    metrics = {
        # Only groups that keep to their step are sampled in several rounds.
        "dynamic_sampling/rounds": 1.0,
        "dynamic_sampling/replaced_groups": 0.0,
        **metrics,
        "preparation/instances": float(plan.preparers),
        **groups_metrics([each.result for each in found], taken.step, switches=switches),
        "generation/waits": float(held_up),
        "generation/dropped_groups": float(groups.count_dropped()),
        "generation/downweighted_groups": float(sum(group.factor != 1 for group in taken.groups)),
    }
    if switches:
        responses = sum(each.result.switched_responses for each in found)
        metrics["generation/switched_responses"] = responses / len(taken.batch.samples)
    examples = [example for each in found for example in each.examples]
    return StepBatch(
        batch=taken.batch,
        cursor={},
        lengths={},
        metrics=metrics,
        plan=plan,
        seconds={},
        samples=kept_examples(examples, taken.batch.samples, run.spec.tracking.sample_groups),
    )


def _position(run: TrainingRun, ahead: RolloutsAhead, batch: StepBatch) -> dict[str, Any]:
    """Return the state that a later driver resumes from after a step. It draws again the prompts that were drawn ahead
    and are not written down."""
    return {**run.position(), "cursor": batch.cursor, **ahead.position(batch.batch.step)}
