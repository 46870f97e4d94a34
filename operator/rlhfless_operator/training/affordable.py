"""Whether a run's next step fits into the job's budget."""

import time

from rlhfless_operator.training.budget import NextStep, check_budget
from rlhfless_operator.training.evaluation import evaluation_due
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.step_journal import StepJournal


def check_affordable(run: TrainingRun, journal: StepJournal, step: int) -> None:
    """Make sure that the budget allows for a step, on top of what is spent so far.

    Raises:
        BudgetExhaustedError: it does not.
    """
    money, gpu_seconds = journal.spent(time.monotonic())
    total = run.prompts.total_steps
    following = NextStep(step, total, evaluation_due(run.spec, step, total), run.plans.planned_ahead)
    check_budget(journal.budget(), run.spec, money, gpu_seconds, journal.records, following)
