"""The saving of a learner's state: beside the next step's generation where a checkpoint is due, or before it is let go.

A learner writes its state after it has published the weights. So the next step begins at once, and its generation hides
the time of the checkpoint. The next step's learning waits for it.
"""

import asyncio
import time
from contextlib import aclosing
from typing import Self

from rlhfless_functions.api import Done, SaveResult, Started
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.platforms.base import InstanceLostError, StateChange, TaskFailedError
from rlhfless_operator.records.status import CheckpointStatus
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun


class StateSaving:
    """Has the learner save its state between two steps.

    Args:
        run: the job in hand.
        journal: its status names the checkpoint.
    """

    def __init__(self, run: TrainingRun, journal: StepJournal) -> None:
        self._run = run
        self._journal = journal
        self._task: asyncio.Task[None] | None = None
        """Writes a checkpoint."""
        self._is_awaited = False
        """Whether the next step waits for that."""
        self._attempts = 0
        self._saved: CheckpointStatus | None = None
        """Checkpoint of a step that is not written down yet."""
        self._metrics: dict[str, float] = {}

    def learner_writes(self, step: int) -> bool:
        """Return whether the learner writes a checkpoint with a step, before the next step begins.

        That is where it can't be written beside the next step, and where one is overdue because it could not be.
        """
        run, every = self._run, self._run.spec.checkpoints.every_steps
        if not self._may_follow(step):
            return checkpoint_due(run.spec, step, run.prompts.total_steps)
        return self._journal.checkpoint_step < (step - 1) // every * every

    async def learnt(self, step: int, checkpoint: str | None) -> None:
        """Let the learner go after a step, unless it is worth keeping, or a checkpoint is due that it has not written.

        In the latter case it counts as working until it has written that, beside the next step.

        Args:
            checkpoint: what it has written with the step.
        """
        run = self._run
        due = checkpoint is None and checkpoint_due(run.spec, step, run.prompts.total_steps)
        if due and self._may_follow(step):
            self._is_awaited = False
            self._task = asyncio.create_task(self._write_checkpoint(step))
        else:
            await self._rest(0 if checkpoint is not None else step - self._journal.checkpoint_step)

    async def checkpoint_written(self) -> None:
        """Wait until no checkpoint is being written. The learner stays: it has work."""
        if self._task is not None and not self._task.done():
            self._is_awaited, began = True, time.monotonic()
            await asyncio.wait([self._task])
            self._metrics["seconds/checkpoint_wait"] = time.monotonic() - began

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the checkpoint that was written since the last call; none if there was none."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    @property
    def saved_step(self) -> int:
        """Step of the newest state that is saved, 0 if there is none."""
        return max(self._journal.checkpoint_step, self._saved.step if self._saved is not None else 0)

    def written_down(self) -> None:
        """Note that the newest step is written down: its checkpoint may be named."""
        saved, journal = self._saved, self._journal
        if saved is not None and saved.step <= journal.status.step:
            self._saved = None
            if saved.step > journal.checkpoint_step:
                journal.saved(saved)

    async def save(self, step: int, uri: str, *, is_work: bool) -> None:
        """Have the learner, which holds the version of a step, write its state. If it can't, a fresh one repeats steps.

        Args:
            uri: where to.
            is_work: whether its time counts as work. Otherwise it counts as the switch to sleep does.
        """
        run, journal = self._run, self._journal
        request = run.requests.save(step, uri, self._attempts)
        self._attempts += 1
        try:
            async with aclosing(run.platform.run(request)) as events:
                async for event in events:
                    if isinstance(event, Started) and not is_work:
                        at = time.monotonic()
                        journal.ledger.observe(StateChange(event.instance, "learning", "switching", at))
                    elif isinstance(event, Done):
                        saved = SaveResult.model_validate(event.result)
                        run.cost_model.saved(saved.seconds)
                        self._saved = CheckpointStatus(step=step, uri=saved.checkpoint)
                        if is_work:
                            self._metrics["seconds/checkpoint"] = saved.seconds
                        self.written_down()
        except (InstanceLostError, TaskFailedError) as error:
            run.progress.note(f"step {step}: the learner's state is not saved, so its steps are repeated: {error}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _may_follow(self, step: int) -> bool:
        """Return whether the learner writes the checkpoint of a step after it. Learners that are several write it with
        the step. Where stages take turns, others want its GPUs afterwards."""
        run = self._run
        alone = run.learners.now == run.learners.chosen == 1 and not run.spec.chooses_learners
        return run.follows_forecasts and alone and step != run.prompts.total_steps

    async def _write_checkpoint(self, step: int) -> None:
        await self.save(step, self._run.folder.checkpoint(step), is_work=True)
        if not self._is_awaited:
            await self._rest(step - self.saved_step)

    async def _rest(self, again: int) -> None:
        """Let the learner go, unless it is worth keeping.

        Args:
            again: how many steps a fresh one would repeat.
        """
        # The watch of the next rollout decides, which knows when the next step is learnt. It alone saves a state.
        run, costs, watched = self._run, self._run.cost_model, self._run.follows_forecasts
        saves = watched and run.learners.now == 1
        restart = costs.letting_go_seconds(again) if saves else costs.restart_seconds(again)
        await run.capacity.use("learning", 0, restart_seconds=restart, undecided=watched)


def checkpoint_due(spec: RLHFJobSpec, step: int, total_steps: int) -> bool:
    """Return whether a checkpoint is due after a step."""
    return step == total_steps or step % spec.checkpoints.every_steps == 0
