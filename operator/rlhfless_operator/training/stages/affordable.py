"""The check of a run's next step against the job's budget."""

import time

from rlhfless_operator.training.journal.budget import BegunSteps, NextStep, check_budget
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.evaluation import evaluation_due


def check_affordable(run: TrainingRun, journal: StepJournal, step: int) -> None:
    """Check that the budget allows for a step, besides what is spent and what unfinished steps will take.

    Raises:
        BudgetExhaustedError: it does not.
    """
    money, gpu_seconds = journal.spent(time.monotonic())
    status, total = journal.status, run.prompts.total_steps
    following = NextStep(step, total, evaluation_due(run.spec, step, total), run.plans.planned_ahead)
    earlier = [NextStep(n, total, evaluation_due(run.spec, n, total)) for n in range(status.step + 1, step)]
    begun = BegunSteps(earlier, money - status.cost, gpu_seconds - status.gpu_seconds)
    check_budget(journal.budget(), run.spec, money, gpu_seconds, journal.records, following, begun)
