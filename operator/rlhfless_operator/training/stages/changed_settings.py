"""Settings that change in the middle of a job: finished steps keep those that they were taken with.

A learner that has lost its memory repeats the steps since the newest checkpoint. With other settings than the first
time it would make other weights than those that the job has published and sampled from.
"""

from typing import get_args

from rlhfless_functions import artifacts
from rlhfless_functions.api import Purpose
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.settings_history import differences, read_settings_history, write_settings_history
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun


def open_settings(run: TrainingRun, journal: StepJournal) -> None:
    """Take the coming steps with the document's settings, and report what changed.

    Raises:
        LeaseLostError: another driver has the job.
        ArtifactError: the history can't be read or written.
    """
    step = journal.status.step + 1
    now = run.requests.step_settings(run.prompts.planned_steps)
    journal.settings = read_settings_history(run.folder)
    before = journal.settings.of(step)
    if before == now:
        return
    if before is not None:
        journal.lease.fenced(_forget_learning, run.folder, step)
        if run.spec.asynchronous is None:
            journal.lease.fenced(_forget_rollouts, run.folder, step + 1)
        if changes := differences(before, now):
            run.progress.note(f"from step {step} on: {', '.join(changes)}; the steps before keep what they had")
    journal.settings = journal.settings.with_change(step, now)
    journal.lease.fenced(write_settings_history, run.folder, journal.settings)


def forget_evaluations(folder: JobFolder, step: int) -> None:
    """Remove the evaluations of an unfinished step and the two after it, and before any step the first one."""
    for each in (*([0] if step == 1 else []), step, step + 1, step + 2):
        artifacts.remove(folder.rollouts(each, "evaluation"))
        artifacts.remove(folder.batches(each, "evaluation"))
        artifacts.remove(folder.result("evaluation", each))


def forget_prepared(folder: JobFolder, step: int) -> None:
    """Remove what an unfinished step and the one after it have prepared and learnt; the step's samples stay."""
    _forget_learning(folder, step)
    _forget_rollouts(folder, step + 1)
    artifacts.remove(folder.batches(step, "training"))
    artifacts.remove(folder.results(step))


def _forget_learning(folder: JobFolder, step: int) -> None:
    """Remove the weights of an unfinished step and the two after it that other settings made, and their evaluations.

    A driver learns a step while the one before is published, and the one before that is written down. It is never
    further ahead.
    """
    steps = step, step + 1, step + 2
    forget_evaluations(folder, step)
    for uri in (
        *(folder.result("learn", each) for each in steps),
        *(folder.weights(each) for each in steps),
        *(folder.critic(each) for each in steps),
        *(folder.checkpoint(each) for each in steps),
        *(folder.state(each) for each in steps),
    ):
        artifacts.remove(uri)


def _forget_rollouts(folder: JobFolder, step: int) -> None:
    """Remove the samples of such weights. An asynchronous job samples only with weights of finished steps."""
    for uri in (
        *(folder.rollouts(step, purpose) for purpose in get_args(Purpose)),
        *(folder.prefixes(step, purpose) for purpose in get_args(Purpose)),
        *(folder.batches(step, purpose) for purpose in get_args(Purpose)),
        folder.results(step),
    ):
        artifacts.remove(uri)
