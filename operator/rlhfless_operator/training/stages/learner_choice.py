"""The number of instances that learn together from a step on, chosen with the step's plan right after a checkpoint.

Learners of another number load the newest checkpoint and repeat the steps since then. Right after a checkpoint there
are none. The choice is written into the status before the step's learning begins. So a driver that takes the step again
learns with as many.
"""

from collections.abc import Sequence

from rlhfless_operator.planner.step.learner_scaling import (
    MOST_STEPS_UNTIL_KNOWN,
    LearnerOption,
    Measured,
    neighbours,
    options,
    sizes,
    worth_trying,
)
from rlhfless_operator.records.status import LearnersStatus
from rlhfless_operator.training.costs.generation_plan import idle_seconds
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun


def offer_learners(run: TrainingRun, journal: StepJournal, step: int) -> None:
    """Give the plan of `step` the numbers of instances that it can choose from.

    There are several if the step before ends with a checkpoint, and two have been measured.
    """
    run.plans.learners = _offered(run, journal, step) if run.spec.chooses_learners else ()


async def choose_learners(run: TrainingRun, journal: StepJournal, step: int) -> None:
    """Choose for a step, unless an earlier driver has, and write down the number and the reason."""
    before, now = journal.status.learners, run.learners.chosen
    decided = before is not None and before.step == step
    if not run.spec.chooses_learners or decided or journal.checkpoint_step != step - 1:
        return
    if run.plans.planned_ahead is None:
        offer_learners(run, journal, step)
    if (trial := _to_try(run, journal, step)) is not None:
        count, reason = trial, f"a trial, as only {now} was measured"
    elif len(run.plans.learners) > 1:
        batch = run.spec.batch
        plan = run.plans.plan_ahead(run.prompts.next(batch.prompts_per_step), batch.samples_per_prompt).planned
        assert plan.learners is not None
        count, reason = plan.learners, _reason(run.plans.learners, run.spec.planning.cost_weight)
    else:
        count, reason = now, "too little is measured to choose another number"
    run.learners.choose(count)
    # Written even if it stays the same: a driver that takes the step again may know more by then.
    chosen = LearnersStatus(step=step, instances=run.learners.chosen, reason=reason)
    await journal.update_status(learners=chosen)
    if chosen.instances != now:
        run.progress.note(f"step {step}: learning with {chosen.instances} instead of {now} instances: {reason}")


def _allowed(run: TrainingRun) -> list[int]:
    most = run.learners.allowed.max
    return sizes(min(max(run.learners.allowed.min, run.cost_model.least_learners), most), most)


def _measured(run: TrainingRun) -> dict[int, Measured]:
    return run.cost_model.learner_scaling(range(1, run.spec.learning.instances.max + 1))


def _offered(run: TrainingRun, journal: StepJournal, step: int) -> list[LearnerOption]:
    now, every, measured = run.learners.chosen, run.spec.checkpoints.every_steps, _measured(run)
    found = options(
        measured,
        _allowed(run),
        now,
        change_seconds=run.cost_model.history.mean("learning/load") / every,
        idle_seconds=idle_seconds(run.cost_model.history, "learning"),
    )
    # A number on trial is kept until its speed is known.
    choice = measured[now].known and max(journal.checkpoint_step, (step - 1) // every * every) == step - 1
    return found if choice else [each for each in found if each.instances == now]


def _to_try(run: TrainingRun, journal: StepJournal, step: int) -> int | None:
    """Return a number to try, if only one is known."""
    now, every, history = run.learners.chosen, run.spec.checkpoints.every_steps, run.cost_model.history
    if [size for size, each in _measured(run).items() if each.known] != [now] or not journal.records:
        return None
    # A plan is made while the step before is learnt, before the time of that step is known.
    steps = every * -(-(MOST_STEPS_UNTIL_KNOWN + 1) // every)
    left = run.prompts.total_steps - step + 1
    share = history.mean("learning") / max(journal.records[-1].seconds, 1e-9)
    for other in neighbours(now, _allowed(run)):
        if worth_trying(now, other, steps=steps, left=left, share=share, cost_weight=run.spec.planning.cost_weight):
            return other
    return None


def _reason(offered: Sequence[LearnerOption], cost_weight: float) -> str:
    found = [
        f"{each.instances} take{'s' if each.instances == 1 else ''} {1000 * each.token_seconds:.3g} s for 1,000 tokens"
        f" and {each.rest_seconds:.3g} s besides{'' if each.measured else ' by the forecast'}"
        for each in offered
    ]
    return f"{'; '.join(found)} (λ {cost_weight:g})"
