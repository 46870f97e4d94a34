"""The plan of the next generation, and the warming of its instances, while a step is learnt."""

from collections.abc import Mapping, Sequence

from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.journal.budget import BudgetExhaustedError
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.affordable import check_affordable
from rlhfless_operator.training.stages.evaluation import evaluation_due
from rlhfless_operator.training.stages.holding import hold_as_planned
from rlhfless_operator.training.stages.learner_choice import offer_learners
from rlhfless_operator.training.stages.prefix_plans import consider_prefixes


async def look_ahead(
    run: TrainingRun, journal: StepJournal, step: int, lengths: Mapping[int, Sequence[int]], learnt_seconds: float
) -> None:
    """Prepare what follows the learning of `step`: its evaluation, or the next step's generation if that will begin.

    Args:
        lengths: of the step's responses, by prompt.
        learnt_seconds: for which the learner has learnt from them.
    """
    plan = await _plan_next(run, journal, step)
    # The next weights are not there yet. An engine that has loaded a model swaps them in at once.
    preload = run.requests.preload(run.requests.initial)
    prompt_tokens = run.prompts.tokens("training")
    tokens = sum(len(each) * prompt_tokens[prompt] + sum(each) for prompt, each in lengths.items())
    whole, rest = run.cost_model.learning_seconds(tokens), run.cost_model.learning_seconds(0)
    if plan is not None and whole is not None and rest is not None:
        within = max(rest, whole - learnt_seconds)
        await run.capacity.expect("generation", len(plan.shares), preload, within=within)
    if step >= run.prompts.total_steps:
        # Nothing is learnt any more. Instances that the last evaluation expects are kept for it.
        await run.capacity.stay({})


async def _plan_next(run: TrainingRun, journal: StepJournal, step: int) -> GenerationPlan | None:
    """Plan the generation that follows the learning of `step`; None if none does, or the job can't afford it."""
    evaluation, total_steps = run.spec.evaluation, run.prompts.total_steps
    if evaluation is not None and evaluation_due(run.spec, step, total_steps):
        prompts = list(range(len(run.prompts.tokens("evaluation"))))
        return run.plans.plan(prompts, evaluation.samples_per_prompt, "evaluation")
    if step >= total_steps:
        return None
    batch = run.spec.batch
    offer_learners(run, journal, step + 1)
    plan = run.plans.plan_ahead(run.prompts.next(batch.prompts_per_step), batch.samples_per_prompt)
    try:
        check_affordable(run, journal, step + 1)
    except BudgetExhaustedError:
        return None
    consider_prefixes(run, step + 1, plan)
    await hold_as_planned(run, step + 1, plan)
    return plan
