"""The learning stage: one request, from a batch to the next weights version; it may begin before the batch is there."""

import asyncio
import math
import time
from functools import partial
from typing import Any, Self

from rlhfless_functions.api import BatchReference, LearnRequest, LearnResult
from rlhfless_operator.planner.step.pace import LOOK_SECONDS, LearnerPace
from rlhfless_operator.platforms.base import InstanceLostError, TaskFailedError
from rlhfless_operator.records.mismatch import EXPLAINED
from rlhfless_operator.records.status import LearnersStatus
from rlhfless_operator.training.costs.generation_plan import GenerationPlan, note_publishing
from rlhfless_operator.training.instances.gang import AttemptError, GangBrokenError, GangIncompleteError, run_together
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.requests.tasks import RETRY_SECONDS, check_retry
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.arrivals import Arrivals
from rlhfless_operator.training.stages.damaged_checkpoints import DamagedCheckpoints
from rlhfless_operator.training.stages.learner_listener import LearnerListener, with_more
from rlhfless_operator.training.stages.mismatch import explained_by_formats
from rlhfless_operator.training.stages.piece_journal import PieceJournal
from rlhfless_operator.training.stages.state_saving import StateSaving
from rlhfless_operator.training.stages.taking_up import TakingUp


class Learning:
    """The learning of one step, cut if the step fails.

    A learner begins with the whole batch, or, when there is enough to learn from, while the batch is still being
    prepared. If it would wait for longer than it is worth, it is let go and requested again. Where stages take turns,
    it waits for nothing: it takes GPUs that actors have left and nobody wants, and leaves them once it has learnt from
    all pieces that there are.

    Args:
        run: the job in hand.
        journal: its status has the weights and checkpoint that the step starts from.
        step: its number.
        saving: has the learner write checkpoints between steps.
        before: the step before, if it is learnt and may not be published. The learner publishes it beside this one.
        beside: whether the learner may go on to the next step before it has published this one.
    """

    def __init__(
        self,
        run: TrainingRun,
        journal: StepJournal,
        step: int,
        saving: StateSaving,
        *,
        before: LearnResult | None = None,
        beside: bool = False,
    ) -> None:
        self._run = run
        self._journal = journal
        self._step = step
        self._before = before
        self._saving = saving
        self._beside = beside
        self._task: asyncio.Task[LearnResult] | None = None
        self._asked = False
        """Whether a learner was requested."""
        self._loading = 0.0
        """Seconds of its work that go to loading its state."""
        self._attempts = 0
        """Number of attempts so far."""
        self._listener = LearnerListener(journal)
        self._damaged = DamagedCheckpoints(run, journal)
        self._arrivals: Arrivals | None = None
        """Groups that a learner follows."""
        self._prepared_at: float | None = None
        """Time at which preparation ended, if the learner began before."""
        self.taking_up = TakingUp(run, journal, step, lambda: self._asked)

    def expect(self, batch: BatchReference, plan: GenerationPlan, pieces: PieceJournal) -> None:
        """Prepare for the batch whose generation begins: a learner may follow it.

        Args:
            batch: names its samples.
            plan: has the forecast of its groups; without one a learner with GPUs of its own waits for the whole batch.
            pieces: the journal that the learner follows.
        """
        groups = plan.planned.groups
        # In the first step nothing is known of learning. There a learner that waits for nothing may begin nevertheless.
        if groups is not None or (self._run.capacity.sleeps and self._run.spec.planning.policy == "cost"):
            self._arrivals = Arrivals(groups, pieces, self._run.spec.batch.prompts_per_step)
            self._task = asyncio.create_task(self._follow(batch, self._arrivals))

    @property
    def learnt_seconds(self) -> float:
        """Seconds for which it has learnt so far."""
        return max(0.0, self._listener.worked_seconds - self._loading)

    def has_work_in(self, left: float) -> float:
        """Return the seconds until a learner that is there has work, if all is prepared in `left`."""
        if self._arrivals is None or self._asked:
            return left
        return min(left, self._suffice_in(self._arrivals, self._pace(self._arrivals, held=True), 0))

    def starts_by_itself(self, left: float) -> bool:
        """Return whether a learner follows, or starts and loads its state as all is prepared in `left` seconds."""
        return self._arrivals is not None or self.taking_up.consider(left)

    async def begin(self, batch: BatchReference) -> None:
        """Begin with a batch, unless a learner follows it already. Return once the learner is at work.

        Args:
            batch: the whole one; or its number of samples, to follow its pieces while its groups are still chosen.

        Raises:
            StageFailedError: the step can't be taken, for example because its loss is not finite.
        """
        self._run.progress.stage("learning", step=self._step)
        following = self._run.folder.pieces(self._step) if batch.count else None
        if self._asked:
            self._prepared_at = time.monotonic()
            if not self._run.capacity.sleeps or self._listener.works:
                return
            # Now its turn comes like that of any other task.
            assert self._arrivals is not None
            following = self._arrivals.folder
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = asyncio.create_task(self._take_step(batch, following=following))
        self._task.add_done_callback(lambda task: self._listener.over())
        await self._listener.heard.wait()
        if self._task.done():
            self._task.result()

    @property
    def is_publishing(self) -> bool:
        """Whether the step is learnt, and the learner has not published it yet."""
        assert self._task is not None
        return self._listener.learned is not None and not self._task.done()

    async def learnt(self) -> None:
        """Wait until the step is learnt, and published unless `is_publishing`.

        Raises:
            StageFailedError: the step can't be taken.
        """
        assert self._task is not None
        while not self.is_publishing and not self._task.done():
            await self._listener.learnt.wait()
        if self._task.done():
            self._task.result()

    async def before_is_published(self) -> dict[str, float] | None:
        """Wait until the step before is published, and return the metrics of that; None if this step fails first."""
        listener = self._listener
        await listener.published.wait()
        assert self._before is not None and self._task is not None
        if listener.metrics is None:
            # A learner that repeats a result has published both steps.
            return {} if not self._task.cancelled() and self._task.exception() is None else None
        size = int(listener.metrics.get("weights/bytes", 0))
        self._run.weights_traffic.published(self._before.weights.version, size, listener.place)
        note_publishing(self._run.cost_model.history, listener.metrics)
        return listener.metrics

    async def goes_on_until(self, other: asyncio.Task[Any]) -> bool:
        """Wait until the step is published, or until another task has succeeded while a learner publishes the step.

        Return whether it is the latter.

        Raises:
            StageFailedError: the step can't be taken.
        """
        assert self._task is not None
        while not self._task.done():
            if not other.done():
                await asyncio.wait([self._task, other], return_when=asyncio.FIRST_COMPLETED)
            elif other.exception() is not None:
                return False
            elif self.is_publishing:
                return True
            else:
                await self._listener.learnt.wait()
        self._task.result()
        return False

    async def let_go(self) -> LearnResult:
        """Leave the step to its learner, which goes on publishing while it takes the next one; return its result."""
        learned = self._listener.learned
        assert self._task is not None and learned is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._run.progress.over("learning", self._step)
        learned = with_more(learned, self._run.weights_traffic.take())
        self._run.cost_model.learned(learned)
        return learned

    async def result(self) -> LearnResult:
        """Wait for the result once the step has begun; then let the learner go, unless it is worth keeping.

        Raises:
            StageFailedError: the step can't be taken.
        """
        assert self._task is not None
        run, learned = self._run, await self._task
        run.progress.over("learning", self._step)
        more = run.weights_traffic.take() | self.taking_up.metrics | self._saving.take_metrics()
        if self._prepared_at is not None:
            more["learning/beyond_preparation"] = time.monotonic() - self._prepared_at
        learned = with_more(learned, more)
        size = int(learned.metrics.get("weights/bytes", 0))
        run.weights_traffic.published(learned.weights.version, size, self._listener.place)
        run.cost_model.learned(learned)
        if self._listener.learned is not None:
            note_publishing(run.cost_model.history, learned.metrics)
        if learned.checkpoint is not None:
            run.learners.recover()
        await self._saving.learnt(self._step, learned.checkpoint)
        return learned

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.taking_up.__aexit__()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _unpublished(self) -> LearnResult | None:
        """The step before, unless it is written down."""
        known = self._before is None or self._journal.status.step >= self._before.weights.version
        return None if known else self._before

    @property
    def _steps_again(self) -> int:
        """Number of steps that a fresh learner repeats before this one."""
        return self._step - 1 - self._journal.checkpoint_step

    def _pace(self, arrivals: Arrivals, *, held: bool) -> LearnerPace:
        price, last = arrivals.time_price, arrivals.last_seconds
        return self._run.cost_model.learner_pace(self._steps_again, held=held, time_price=price, last_seconds=last)

    async def _follow(self, batch: BatchReference, arrivals: Arrivals) -> LearnResult:
        """Have the batch learnt from as it comes, in as many attempts as are worth it."""
        run, listener, capacity = self._run, self._listener, self._run.capacity
        done = 0
        while True:
            # Meanwhile a learner may be let go.
            while self._suffice_in(arrivals, pace := self._pace(arrivals, held=capacity.holds("learning")), done) > 0:
                await asyncio.sleep(LOOK_SECONDS)
            waits = not capacity.sleeps or self._prepared_at is not None
            attempt = asyncio.create_task(self._take_step(batch, following=arrivals.folder, waits=waits))
            keeps = capacity.stays or capacity.sleeps
            try:
                while not attempt.done() and (keeps or not arrivals.are_late(pace, listener.waits_after)):
                    await asyncio.wait([attempt], timeout=LOOK_SECONDS)
                done = listener.waits_after or done
            finally:
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
            if not attempt.cancelled() and not _awaits_pieces(attempt.exception()):
                # It may have ended just when it was to be let go.
                return attempt.result()
            # Its accumulated gradients stay with its instance. A new one learns from the journal again.
            listener.waits_after = None
            await run.capacity.use("learning", 0)
            if not capacity.sleeps:
                await run.capacity.finish("learning")

    def _suffice_in(self, arrivals: Arrivals, pace: LearnerPace, done: int) -> float:
        """Return the seconds until a learner that has finished so many pieces should be asked for; 0 for now."""
        capacity, complete = self._run.capacity, self._prepared_at is not None
        if capacity.sleeps and complete:
            return 0.0
        # On a GPU that an actor or preparation waits for, it would wait for their groups.
        if not complete and not capacity.has_room("learning"):
            return math.inf
        return math.inf if capacity.sleeps and arrivals.pieces == done else arrivals.suffice_in(pace, done)

    async def _take_step(
        self, batch: BatchReference, *, following: str | None = None, waits: bool = True
    ) -> LearnResult:
        """Request the step from the learners. Those that lost their memory repeat the steps since the newest
        checkpoint.

        Args:
            following: the journal of the batch's pieces, if a learner follows it.
            waits: whether it waits for them. An attempt that begins once the batch is complete does in any case.

        Raises:
            StageFailedError: the step can't be taken.
            TaskFailedError: a learner that does not wait has learnt from all pieces so far.
        """
        run, journal, size, retries = self._run, self._journal, self._run.learners, 0
        if not self._asked and not run.capacity.holds("learning"):
            self._loading = run.cost_model.restart_seconds(self._steps_again)
        self._asked = True
        await self._saving.checkpoint_written()
        while True:
            count = size.now
            counts = {"learning/instances": float(count)}
            if (explained := explained_by_formats(run.spec)) is not None:
                counts[EXPLAINED] = explained
            if run.spec.chooses_learners:
                counts["learning/instances_chosen"] = float(size.chosen)
            self._listener.begins(counts)
            await run.capacity.use("learning", count, run.learner_preload)
            # Once the batch is complete, one that comes again must not wait until nobody else wants its GPUs.
            waits = waits or self._prepared_at is not None
            requests = self._requests(batch, await self._batches_again(), count, following, waits)
            # An earlier one may have been let go after several attempts, and none is to have its name.
            self._attempts += 1
            # The first instance publishes.
            listeners = [self._listener, *(LearnerListener(journal) for _ in requests[1:])]
            try:
                result = await run_together(
                    run.platform,
                    requests,
                    within=run.spec.learning.gang_timeout,
                    stall=run.spec.limits.stall,
                    listener=partial(next, iter(listeners)),
                )
                size.met(count)
                await self._damaged.remove()
                return with_more(LearnResult.model_validate(result), counts)
            except GangIncompleteError as error:
                if size.miss(error.there):
                    came = f"{error.there} of {count} learning instances came within learning.gangTimeout"
                    await self._go_on_with_fewer(batch.step, count, f"{came}; going on with {size.now}")
                    continue
                lost: AttemptError = InstanceLostError(size.absence(error.there, count))
            except GangBrokenError as error:
                lost = error.error
                if _awaits_pieces(lost):
                    raise lost from error
                if isinstance(lost, TaskFailedError) and lost.reason == "checkpoint_damaged":
                    await self._damaged.go_back(batch.step, lost)
                    continue
                if await self._has_more_memory(batch.step, count, lost):
                    continue
                if error.lost and count > 1:
                    size.fall_to(count - error.lost)
                    again = f"{lost}; taken again with {size.now} learning instances"
                    await self._go_on_with_fewer(batch.step, count, again)
            self._listener.lost()
            retries += 1
            check_retry(lost, retries, run.spec.limits.retries, f"learning of step {batch.step}")
            await asyncio.sleep(RETRY_SECONDS)

    async def _batches_again(self) -> list[BatchReference]:
        """Return the batches since the newest checkpoint. There may be a newer one while they are read: a learner saves
        its state before it is let go."""
        while True:
            checkpoint = self._journal.status.checkpoint
            batches = await asyncio.to_thread(self._journal.batches_since_checkpoint, self._step)
            if self._journal.status.checkpoint == checkpoint:
                return batches

    def _requests(
        self, batch: BatchReference, replay: list[BatchReference], count: int, following: str | None, waits: bool
    ) -> list[LearnRequest]:
        """Return the request for each of so many learning instances."""
        run, journal = self._run, self._journal
        return [
            run.requests.learn(
                journal.status,
                batch,
                replay,
                journal.settings,
                run.prompts.planned_steps,
                checkpoint_due=self._saving.learner_writes(batch.step),
                attempt=self._attempts,
                following=following,
                gang=gang,
                before=self._unpublished,
                publish_beside=self._beside and gang is None,
            ).model_copy(update={"waits": waits})
            for gang in run.requests.gang(batch.step, count)
        ]

    async def _go_on_with_fewer(self, step: int, count: int, why: str) -> None:
        """Give up the instances beyond those that a step is taken with from now on."""
        run = self._run
        await run.capacity.give_up("learning", count - run.learners.now)
        run.progress.note(f"step {step}: {why}")

    async def _has_more_memory(self, step: int, count: int, lost: AttemptError) -> bool:
        """Choose more learning instances where so many had too little memory; return whether there may be more."""
        run, size = self._run, self._run.learners
        lacks_memory = isinstance(lost, TaskFailedError) and lost.reason == "out_of_memory"
        if not lacks_memory or not size.exceed(count, str(lost)):
            return False
        run.cost_model.learners_too_few(count)
        chosen = LearnersStatus(step=step, instances=size.now, reason=f"{count} had too little memory")
        await self._journal.update_status(learners=chosen)
        run.progress.note(f"step {step}: {lost}; taken again with {size.now} learning instances")
        return True


def _awaits_pieces(error: BaseException | None) -> bool:
    return isinstance(error, TaskFailedError) and error.reason == "awaits_pieces"
