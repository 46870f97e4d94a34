"""Rollouts that are made ahead of the learner, as far as staleness allows, and the groups that steps take of them.

They share live actors. The next rollout begins as soon as one of its groups has room there: the longest responses of a
step are generated beside the first ones of the next. Complete groups are prepared, and wait until a step takes them.
With dynamic sampling a step learns from the groups of its own rollout.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Self

from rlhfless_functions.api import WeightsReference
from rlhfless_operator.job.asynchrony import AsyncSpec
from rlhfless_operator.planner.groups.group_buffer import ChosenGroup, piece_size
from rlhfless_operator.planner.groups.staleness import last_step_begun, steps_ahead
from rlhfless_operator.records.journal import PlanRecord, StepBatch
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.asynchronous.earlier_drivers import Unfinished, restore_groups
from rlhfless_operator.training.asynchronous.free_groups import FreeGroups
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.journal.async_journal import (
    AsyncJournal,
    BegunRollout,
    TakenStep,
    chosen_piece,
    step_of_pieces,
)
from rlhfless_operator.training.journal.budget import BudgetExhaustedError
from rlhfless_operator.training.journal.lease import LeaseLostError
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.affordable import check_affordable
from rlhfless_operator.training.stages.live_generation import open_live_actors
from rlhfless_operator.training.stages.rollout import RolloutTask, roll_out
from rlhfless_operator.training.stages.rollout_record import (
    plan_record,
    record_rollout,
    rollout_metrics,
    with_switches,
    with_versions,
)
from rlhfless_operator.training.stages.unscorable import UnscorableError

_ROLLOUT = "rollout"
"""Name of the rollouts' durations in the history."""
_Made = tuple[BegunRollout, StepBatch]


class RolloutsAhead:
    """Generates and prepares in the background, from when it is entered until it is left.

    Finished rollouts wait in the store. Once one has failed, no more begin. Its error is raised when nothing is left to
    learn from, except that an UnscorableError is raised with the next step. A rollout that does not fit the budget is
    tried again after each step.

    Args:
        run: the job in hand.
        journal: its status says how far the learner is.
        files: record the weights that sample each group.
        settings: limits of staleness, and the weights to use.
    """

    def __init__(self, run: TrainingRun, journal: StepJournal, files: AsyncJournal, settings: AsyncSpec) -> None:
        self._run = run
        self._journal = journal
        self._files = files
        self._settings = settings
        self._rollouts: dict[int, asyncio.Task[_Made | None]] = {}
        """Rollouts that may be under way or wait for room, by number. Those that the data did not suffice for return
        None."""
        self._last = journal.status.step
        """The last rollout that may begin."""
        self._unfinished = Unfinished()
        """Steps that have groups already."""
        self._unreported: list[StepBatch] = []
        """Rollouts that are complete since the last step."""
        self._plan: PlanRecord | None = None
        """The newest plan."""
        self._planned = asyncio.Event()
        # A step may learn from groups that many steps late, after those steps have made their weights.
        self._live = open_live_actors(run, settings.max_staleness, self._is_last)
        """The actors of all rollouts."""
        size, done = run.spec.batch.prompts_per_step, journal.status.step
        free = not run.requests.algorithm.dynamic_sampling_rounds
        least = piece_size(size) if run.requests.learns_in_pieces else 0
        self.groups = FreeGroups(size, settings.max_staleness, settings.too_stale, done, least=least) if free else None
        """Groups that any later step may take; None if groups keep to their step."""

    async def rollout(self, step: int) -> _Made:
        """Return a step's complete rollout, and the weights and prompts that it was made with. Ask for each step once.

        Raises:
            StageFailedError: generation or preparation can't be done.
            UnscorableError: too few of the samples have a reward.
            BudgetExhaustedError: the step would take the job past its budget.
        """
        try:
            made = await self._rollouts[step]
            assert made is not None, "the step before was not the last"
            return made
        finally:
            del self._rollouts[step]

    async def take(self, step: int, on_piece: Callable[[], None]) -> tuple[TakenStep, bool]:
        """Choose the groups of a step, and write them down.

        Return them, and whether the step had to wait for a group that would have become too stale. Ask for each step
        once, in order; again only after an error. The step before need not be written down.

        Args:
            on_piece: called when a learner may begin with a piece of the step that is written down.

        Raises:
            StageFailedError: generation or preparation can't be done.
            UnscorableError: too few of the samples have a reward.
            BudgetExhaustedError: the step would take the job past its budget.
            LeaseLostError: another driver has chosen other groups.
        """
        groups, earlier = self.groups, self._unfinished
        assert groups is not None
        # The step's record includes a plan.
        await self._until_planned()
        if step in earlier.taken:
            return earlier.taken.pop(step), False
        pieces, waited = earlier.pieces.setdefault(step, []), False
        while (held := sum(len(piece.groups) for piece in pieces)) < groups.buffer.size:
            if pieces:
                on_piece()
            chosen, held_up = await self._choose(groups, step, held)
            waited = waited or held_up
            piece = chosen_piece(chosen, self._run.spec.batch.samples_per_prompt)
            if groups.in_pieces:
                piece = await asyncio.to_thread(self._files.add, step, len(pieces), piece)
                groups.take(step, piece.groups)
            pieces.append(piece)
        whole = step_of_pieces(step, pieces, at_once=not groups.in_pieces)
        taken = await asyncio.to_thread(self._files.take, whole)
        if groups.in_pieces and taken.groups != whole.groups:
            # A learner may follow the pieces.
            raise LeaseLostError(f"another driver has chosen the groups of step {step}")
        groups.take(step, taken.groups)
        groups.remember(taken)
        earlier.pieces.pop(step)
        return taken, waited

    async def _choose(self, groups: FreeGroups, step: int, held: int) -> tuple[list[ChosenGroup], bool]:
        """Wait for groups of a step that has taken `held` already. Return them, and whether one would have become too
        stale without waiting."""
        waited = False
        while True:
            self._raise_unscorable()
            groups.changed.clear()
            if chosen := groups.choose(step, held):
                return chosen, waited
            waited = waited or groups.buffer.has_enough(held)
            # Dropped groups make room for others.
            self._begin_more()
            running = [rollout for rollout in self._rollouts.values() if not rollout.done()]
            if not running:
                self._raise_failure()
                # Once the step before is written down, more may begin.
                assert self._journal.status.step < step - 1, "a step waits for groups, and no rollout is under way"
            await _until(groups.changed, running)

    def advance(self) -> None:
        """Begin more rollouts, as far as staleness and the budget allow. Call it when a step is done, and before the
        first."""
        for number, rollout in sorted(self._rollouts.items()):
            # The step may have taken less than its forecast.
            if _failed(rollout) and isinstance(rollout.exception(), BudgetExhaustedError):
                self._begin_task(number)
        self._begin_more()
        if self.groups is not None:
            # A step that waits for groups waits for these rollouts, too.
            self.groups.changed.set()

    def _begin_more(self) -> None:
        if self.groups is not None:
            self.groups.finish(self._journal.status.step)
        number = self._last + 1
        # The groups that have begun are learnt from. More would hide a failure for longer.
        while not self._has_failed and self._is_admitted(number):
            self._begin_task(number)
            number += 1
        for older, rollout in [*self._rollouts.items()]:
            # A failed one is raised when nothing else can be learnt from.
            if self.groups is not None and older < self._last and rollout.done() and not _failed(rollout):
                del self._rollouts[older]

    async def finish(self) -> None:
        """Wait, after the last step, until it is known whether the last rollouts could be scored.

        Raises:
            UnscorableError: too few of the samples have a reward.
        """
        if self._rollouts:
            await asyncio.wait(self._rollouts.values())
        self._raise_unscorable()

    def report(self) -> tuple[PlanRecord | None, dict[str, float]]:
        """Return the newest plan, and the metrics of the rollouts that are complete since the last call."""
        found, self._unreported = self._unreported, []
        switches, kept = self._settings.new_weights == "switch", self._settings.kv_cache == "keep"
        return self._plan, rollout_metrics([batch.metrics for batch in found], switches=switches, kept=kept)

    async def __aenter__(self) -> Self:
        if self.groups is not None:
            await self._restore(self.groups)
            for number in sorted(self.groups.rollouts):
                self._begin_task(number)
        self.advance()
        return self

    async def __aexit__(self, *_: object) -> None:
        for rollout in self._rollouts.values():
            rollout.cancel()
        await asyncio.gather(*self._rollouts.values(), return_exceptions=True)
        await self._live.close()

    async def _restore(self, groups: FreeGroups) -> None:
        """Restore the groups that earlier drivers have written down."""
        run, journal = self._run, self._journal
        written = groups, run.folder, run.prompts, journal.status.step, journal.kept_batches_from
        self._unfinished = await asyncio.to_thread(restore_groups, *written)
        self._plan, self._last = self._unfinished.plan, groups.last
        self._cursor = run.prompts.cursor.state()

    def _begin_task(self, number: int) -> None:
        earlier = self._rollouts.get(number - 1)
        self._rollouts[number] = asyncio.create_task(self._make(number, earlier))
        self._last = max(self._last, number)

    def _is_admitted(self, number: int) -> bool:
        """Return whether one more rollout may begin."""
        total = self._run.prompts.total_steps
        if self.groups is None:
            return number <= min(last_step_begun(self._journal.status.step, self._steps_ahead()), total)
        admitted, buffer = number - 1 - self.groups.last, self.groups.buffer
        return buffer.admits_rollout(admitted, total * buffer.size, self._journal.status.step, self._steps_ahead())

    def _is_last(self) -> bool:
        """Return whether no rollout follows those that have begun."""
        total = self._run.prompts.total_steps
        return (
            self._last >= total if self.groups is None else self.groups.buffer.live >= total * self.groups.buffer.size
        )

    def _steps_ahead(self) -> int:
        """Return how many steps rollouts may begin ahead of the learner."""
        journal, history = self._journal, self._run.cost_model.history
        # The groups that steps take are known once one of them is done.
        unknown = journal.budget() is not None and not any(record.step for record in journal.records)
        ahead = steps_ahead(self._settings.max_staleness, history.mean(_ROLLOUT), history.mean("learning"))
        return 0 if unknown else ahead

    async def _make(self, step: int, earlier: asyncio.Task[_Made | None] | None) -> _Made | None:
        try:
            if earlier is not None:
                await self._wait_for_room(step, earlier)
            if self.groups is None and step > self._run.prompts.total_steps:
                # The rollout before has drawn the last prompts of the job's epochs.
                return None
            return await self._roll_out(step)
        finally:
            self._live.release(step)

    async def _wait_for_room(self, step: int, earlier: asyncio.Task[_Made | None]) -> None:
        """Wait until there is room beside the rollout of the step before."""
        if self._run.requests.algorithm.dynamic_sampling_rounds:
            # It may still draw the prompts that come next.
            await earlier
            return
        room = asyncio.create_task(self._live.room(step, self._newest, beside=step - 1))
        try:
            await asyncio.wait({room, earlier}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            room.cancel()
        if earlier.done():
            # If it has failed, this one never begins.
            earlier.result()

    async def _roll_out(self, step: int) -> _Made:
        run, journal = self._run, self._journal
        # The next driver would make a version again that is not written down.
        await journal.written()
        check_affordable(run, journal, min(step, run.prompts.total_steps))
        begun = self.groups.rollouts.get(step) if self.groups is not None else None
        if begun is None:
            begun = await self._begin(step)
        beside = any(not rollout.done() for other, rollout in self._rollouts.items() if other < step)
        run.progress.begin_step(
            step, run.spec.batch.prompts_per_step * run.spec.batch.samples_per_prompt, beside=beside
        )
        task = RolloutTask(step, "training", self._weights(begun), live=self._live)
        groups = self.groups
        if groups is not None:
            on_prepared = partial(groups.prepared, step)
            task = replace(task, prompts=begun.prompts, on_plan=self._on_plan, on_prepared=on_prepared)
        rollout = await roll_out(run, task, lambda batch, plan, pieces: None)
        if isinstance(rollout, StepBatch):
            if groups is not None:
                self._plan = rollout.plan
                self._measure(groups, step, rollout)
            return begun, rollout
        run.cost_model.history.add(_ROLLOUT, sum(rollout.seconds.values()))
        batch = record_rollout(run, rollout)
        if groups is not None:
            self._unreported.append(with_switches(batch, rollout) if self._settings.new_weights == "switch" else batch)
            self._plan = batch.plan
            self._measure(groups, step, batch)
            journal.keep_rollout(step, batch)
            return begun, batch
        if self._settings.new_weights == "switch":
            batch = with_versions(batch, rollout)
        journal.keep_batch(step, batch)
        return begun, batch

    async def _begin(self, number: int) -> BegunRollout:
        """Draw the prompts of a rollout, and write them down with its weights."""
        groups, draws = self.groups, self._run.prompts
        begun = BegunRollout(step=number, policy=self._newest())
        if groups is None:
            return await asyncio.to_thread(self._files.begin, begun)
        again, others = groups.next_rollout(draws.total_steps * groups.buffer.size)
        prompts = [name.prompt for name in again]
        prompts += draws.cursor.draw(others, taken=prompts)
        chosen = {"prompts": prompts, "again": again, "cursor": draws.cursor.state()}
        begun = await asyncio.to_thread(self._files.begin, begun.model_copy(update=chosen))
        draws.go_to(begun.cursor)
        groups.begin(begun)
        self._cursor = begun.cursor
        return begun

    def position(self, step: int) -> dict[str, Any]:
        """Return the state of the groups that a later driver needs once a step is done."""
        groups = self.groups
        if groups is None:
            return {}
        needs = groups.needs(step, self._journal.kept_batches_from, self._last)
        state = groups.state(step)
        plan = self._plan.model_dump() if self._plan is not None else None
        return {"cursor": self._cursor, "groups": state, "needs": needs, "plan": plan}

    async def _until_planned(self) -> None:
        """Wait until any rollout is planned, by this driver or an earlier one."""
        while self._plan is None:
            await _until(self._planned, self._rollouts.values())
            self._raise_failure()

    @property
    def _has_failed(self) -> bool:
        return any(_failed(rollout) for rollout in self._rollouts.values())

    def _raise_failure(self) -> None:
        """Raise the error of the earliest rollout that has failed, if any has."""
        for rollout in self._rollouts.values():
            if rollout.done():
                rollout.result()

    def _raise_unscorable(self) -> None:
        """Raise the UnscorableError of a rollout at once: its groups must be scored again before any step learns from
        them."""
        for rollout in self._rollouts.values():
            if _failed(rollout) and isinstance(rollout.exception(), UnscorableError):
                rollout.result()

    def _on_plan(self, plan: GenerationPlan) -> None:
        self._plan = plan_record(plan, prefixes=self._run.prefixes.reason)
        self._planned.set()

    def _measure(self, groups: FreeGroups, number: int, batch: StepBatch) -> None:
        """Learn the lengths of a complete rollout, once."""
        if number in groups.rollouts and number not in groups.measured:
            self._run.cost_model.measured(batch.lengths, self._run.prompts.tokens("training"))
            self._run.draft_history.generated(number, batch.lengths)
            groups.measured.add(number)

    def _weights(self, begun: BegunRollout) -> SamplingWeights:
        """Return the weights that the requests of a rollout sample with."""
        # The next driver would make a version again that is not written down.
        return SamplingWeights(begun.policy, self._newest if self._settings.new_weights == "switch" else None)

    def _newest(self) -> WeightsReference:
        """Return the newest weights that are written down."""
        return self._run.requests.weights(self._journal.published.weights)


async def _until(event: asyncio.Event, rollouts: Iterable[asyncio.Task[_Made | None]]) -> None:
    """Wait until an event is set, or one of these rollouts ends."""
    happened = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([happened, *rollouts], return_when=asyncio.FIRST_COMPLETED)
    finally:
        happened.cancel()


def _failed(rollout: asyncio.Task[_Made | None]) -> bool:
    return rollout.done() and rollout.exception() is not None
