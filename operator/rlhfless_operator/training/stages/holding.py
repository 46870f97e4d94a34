"""Keeping the instances of all stages for a whole step, where the plan finds that cheaper than to start them again."""

from rlhfless_functions.api import Stage
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.run import TrainingRun


async def hold_as_planned(run: TrainingRun, step: int, plan: GenerationPlan) -> None:
    """Keep instances from now on if the plan of a step holds them, and leave them to forecasts if not."""
    if not run.follows_forecasts:
        return
    planned, capacity = plan.planned, run.capacity
    counts: dict[Stage, int] = {}
    if planned.holds:
        learners = planned.learners or run.learners.now
        counts = {"generation": len(plan.shares), "preparation": planned.preparers, "learning": learners}
    if planned.holds != capacity.stays:
        what = "the instances of all stages stay from now on" if planned.holds else "instances are let go again"
        run.progress.note(f"step {step}: {what}: {planned.holds_reason}")
    await capacity.stay(counts)
