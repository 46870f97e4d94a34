"""Files that change in the middle of a job: the coming steps and evaluations take the new ones, and that is recorded.

Data, templates and models of training can't change any more (`driver.py` refuses them), because finished steps would
mean something else. The code of rewards, reward models and the evaluation's data can.
"""

from rlhfless_functions import artifacts
from rlhfless_operator.records.input_digests import (
    Digests,
    InputChange,
    changed,
    read_digests,
    record_change,
    write_digests,
)
from rlhfless_operator.training.journal.inputs import described, is_reward, take_digests
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.changed_settings import forget_evaluations, forget_prepared


def open_inputs(run: TrainingRun, journal: StepJournal) -> None:
    """Take the coming steps with the inputs as they are now, and report what changed since the last driver.

    Raises:
        LeaseLostError: another driver has the job.
        ArtifactError: the digests can't be read or written.
    """
    before = read_digests(run.folder) or {}
    now = take_digests(run.spec, before)
    if now == before:
        return
    if names := changed(before, now):
        journal.lease.fenced(_take, run, journal, names, now)
    # What can't be seen now may be seen again.
    journal.lease.fenced(write_digests, run.folder, {**before, **now})


def _take(run: TrainingRun, journal: StepJournal, names: list[str], now: Digests) -> None:
    step = journal.status.step + 1
    if any(name.startswith("spec.evaluation.data") for name in names):
        artifacts.remove(run.folder.data("evaluation"))
        artifacts.remove(run.requests.materialize("evaluation", 0).result)
        forget_evaluations(run.folder, step)
    if any(map(is_reward, names)):
        forget_evaluations(run.folder, step)
        if run.spec.asynchronous is None:
            forget_prepared(run.folder, step)
    inputs = [described(name, now[name]) for name in names]
    record_change(run.folder, InputChange(from_step=step, inputs=inputs))
    run.progress.note(
        f"from step {step} on: {', '.join(inputs)} changed and is taken as it is now; the steps before keep what they"
        " had"
    )
