"""A damaged checkpoint: an older one serves.

A learner that starts from an older one repeats more steps, from the same batches, and comes to the same bits. So
nothing else of the job goes back: weights, records and position in the data stay.
"""

import asyncio

from rlhfless_functions import artifacts
from rlhfless_functions.api import BatchReference
from rlhfless_operator.platforms.base import TaskFailedError
from rlhfless_operator.training.journal.older_checkpoints import older_checkpoints
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.requests.tasks import StageFailedError
from rlhfless_operator.training.run import TrainingRun


class DamagedCheckpoints:
    """The checkpoints that learners of one step could not start from.

    Args:
        run: the job in hand.
        journal: its status names the checkpoint that learners start from.
    """

    def __init__(self, run: TrainingRun, journal: StepJournal) -> None:
        self._run = run
        self._journal = journal
        self._damaged: list[str] = []

    async def go_back(self, step: int, damage: TaskFailedError) -> None:
        """Go back to the newest of the older checkpoints.

        Args:
            step: the step that is to be taken.
            damage: the error of a learner that could not start from the present checkpoint.

        Raises:
            StageFailedError: no older one serves.
        """
        damaged = self._journal.status.checkpoint
        assert damaged is not None
        replay = await asyncio.to_thread(self._replay_from_older, step)
        if replay is None:
            raise StageFailedError(
                f"{damage}. No older checkpoint serves: checkpoints.keep says how many stay, with the batches since"
            )
        self._damaged.append(damaged.uri)
        older = self._journal.status.checkpoint
        place = f"the checkpoint of step {older.step}" if older is not None else "the model as given"
        again = f"steps {replay[0].step} to {replay[-1].step} are learnt again, from the same batches"
        self._run.progress.note(f"step {step}: {damaged.uri} is damaged; going back to {place}: {again}")

    async def remove(self) -> None:
        """Remove them, once an older one has served: they would count as checkpoints to keep.

        Raises:
            LeaseLostError: another driver has the job.
        """
        while self._damaged:
            await self._journal.remove_checkpoint(self._damaged.pop())

    def _replay_from_older(self, step: int) -> list[BatchReference] | None:
        """Let the status name an older checkpoint with the batches of all steps since, and return those. Return None,
        and leave the status as it is, if there is none."""
        journal, damaged = self._journal, self._journal.status.checkpoint
        assert damaged is not None
        for older in older_checkpoints(self._run.folder, damaged):
            journal.go_back(older)
            try:
                batches = journal.batches_since_checkpoint(step)
            except artifacts.ArtifactError as error:
                if not error.retryable:
                    continue
                journal.go_back(damaged)
                raise
            if all(artifacts.exists(part) for batch in batches for part in batch.parts):
                return batches
        journal.go_back(damaged)
        return None
