"""The learning stage: one request, from a batch to the next weights version; it may begin before the batch is there."""

import asyncio
import math
import time
from functools import partial
from types import TracebackType
from typing import Self

from rlhfless_functions.api import BatchReference, Event, LearnResult, Started, Waiting
from rlhfless_functions.artifacts import join
from rlhfless_operator.platforms.base import InstanceLostError, InstanceState, StateChange
from rlhfless_operator.training.gang import AttemptError, GangBrokenError, GangIncompleteError, run_together
from rlhfless_operator.training.planning import GenerationPlan
from rlhfless_operator.training.preparation import chunks_of
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.step_journal import StepJournal
from rlhfless_operator.training.tasks import RETRY_SECONDS, check_retry


class Learning:
    """The learning of one step, cut if the step fails.

    A learner begins with the whole batch, or, when the plan says so, while the batch is still being prepared.
    """

    def __init__(self, run: TrainingRun, journal: StepJournal, step: int) -> None:
        self._run = run
        self._journal = journal
        self._step = step
        self._task: asyncio.Task[LearnResult] | None = None
        self._asked = False
        """Whether a learner has been asked."""
        self._heard = asyncio.Event()
        self._place: list[str] = []
        """Of the learner; see `Started.place`."""
        self._prepared_at: float | None = None
        """When preparation ended, where the learner began before."""

    def expect(self, batch: BatchReference, plan: GenerationPlan) -> None:
        """Generation begins.

        Args:
            batch: its samples in canonical order, and the parts that an earlier driver had prepared.
            plan: says when to begin; never, where nothing is gained.
        """
        if math.isfinite(plan.learning_begins):
            self._task = asyncio.create_task(self._follow(batch, plan.learning_begins))

    async def begin(self, batch: BatchReference) -> None:
        """The batch is there: begin, unless a learner follows it already. Returns once the learner is at work.

        Raises:
            StageFailedError: the step can't be taken, for a loss that is not finite for one.
        """
        self._run.progress.stage("learning")
        if self._asked:
            self._prepared_at = time.monotonic()
            return
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._take_step(batch))
        self._task.add_done_callback(lambda task: self._heard.set())
        await self._heard.wait()
        if self._task.done():
            self._task.result()

    async def result(self) -> LearnResult:
        """What it comes to, once it has begun; then the learner is let go, unless it is worth keeping.

        Raises:
            StageFailedError: the step can't be taken.
        """
        assert self._task is not None
        learned = await self._task
        run, journal = self._run, self._journal
        more = run.weights_traffic.take()
        if self._prepared_at is not None:
            more["learning/beyond_preparation"] = time.monotonic() - self._prepared_at
        learned = learned.model_copy(update={"metrics": {**learned.metrics, **more}})
        size = int(learned.metrics.get("weights/bytes", 0))
        run.weights_traffic.published(learned.weights.version, size, self._place)
        # Unless it is kept, its successor takes the steps since the newest checkpoint again.
        again = 0 if learned.checkpoint is not None else self._step - journal.checkpoint_step
        run.cost_model.learned(learned)
        if learned.checkpoint is not None:
            run.learners.recover()
        await run.capacity.use("learning", 0, restart_seconds=run.cost_model.restart_seconds(again))
        return learned

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self, batch: BatchReference, after_seconds: float) -> LearnResult:
        await asyncio.sleep(after_seconds)
        self._asked = True
        folder = self._run.folder.batches(batch.step, "training")
        return await self._take_step(batch, following=join(folder, chunks_of(self._run.driver)))

    async def _take_step(self, batch: BatchReference, *, following: str | None = None) -> LearnResult:
        """Ask the learners. Those that lost their memory replay the batches since the newest checkpoint."""
        run, journal, size = self._run, self._journal, self._run.learners
        replay = journal.batches_since_checkpoint(batch.step)
        total_steps = run.prompts.total_steps
        attempt = 0
        while True:
            count = size.now
            await run.capacity.use("learning", count, run.learner_preload)
            requests = [
                run.requests.learn(
                    journal.status,
                    batch,
                    replay,
                    journal.settings,
                    total_steps,
                    checkpoint_due=batch.step == total_steps or batch.step % run.spec.checkpoints.every_steps == 0,
                    attempt=attempt,
                    following=following,
                    gang=gang,
                )
                for gang in run.requests.gang(batch.step, count)
            ]
            listeners = [_Listener(self._heard, journal) for _ in requests]
            try:
                result = await run_together(
                    run.platform,
                    requests,
                    within=run.spec.learning.gang_timeout,
                    listener=partial(next, iter(listeners)),
                )
                # The first of them publishes.
                self._place = listeners[0].place
                learned = LearnResult.model_validate(result)
                return learned.model_copy(update={"metrics": {**learned.metrics, "learning/instances": float(count)}})
            except GangIncompleteError as error:
                if size.fall_to(error.there):
                    await run.capacity.give_up("learning", count - size.now)
                    run.progress.note(
                        f"step {batch.step}: {error.there} of {count} learning instances came within"
                        f" learning.gangTimeout; going on with {size.now}"
                    )
                    continue
                lost: AttemptError = InstanceLostError(
                    f"{error.there} of {count} learning instances came within learning.gangTimeout, and"
                    f" learning.instances.min is {size.allowed.min}; lower it, or make room for more"
                )
            except GangBrokenError as error:
                lost = error.error
                if error.lost and count > 1:
                    size.fall_to(count - error.lost)
                    await run.capacity.give_up("learning", count - size.now)
                    run.progress.note(f"step {batch.step}: {lost}; taken again with {size.now} learning instances")
            attempt += 1
            check_retry(lost, attempt, run.spec.limits.retries, f"learning of step {batch.step}")
            await asyncio.sleep(RETRY_SECONDS)


class _Listener:
    """Hears what a learner says of itself."""

    def __init__(self, heard: asyncio.Event, journal: StepJournal) -> None:
        self._heard = heard
        self._ledger = journal.ledger
        self._instance = ""
        self.place: list[str] = []
        """Of the learner; see `Started.place`."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._instance, self.place = event.instance, event.place
        elif isinstance(event, Waiting):
            # It holds its GPU for nothing, and that is what the ledger shall say.
            state: InstanceState = "idle" if event.waiting else "busy"
            self._ledger.observe(StateChange(self._instance, "learning", state, time.monotonic()))
        self._heard.set()
