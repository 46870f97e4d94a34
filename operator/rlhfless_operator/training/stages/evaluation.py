"""The evaluation of one version of the weights: its mean reward on prompts that are not trained on."""

import asyncio
from collections.abc import Callable

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.records.journal import mean_metrics
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.prepared import PreparationOutcome
from rlhfless_operator.training.actors.sampling_weights import SamplingWeights
from rlhfless_operator.training.journal.samples import When, evaluation_examples
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun
from rlhfless_operator.training.stages.rollout import RolloutTask, generate_and_prepare
from rlhfless_operator.training.stages.unscorable import check_unscorable


def evaluation_due(spec: RLHFJobSpec, step: int, total_steps: int) -> bool:
    """Return whether the weights after `step` are evaluated."""
    if spec.evaluation is None:
        return False
    every = spec.evaluation.every_steps
    return step in (0, total_steps) or (every is not None and step % every == 0)


async def evaluate(
    run: TrainingRun,
    journal: StepJournal,
    step: int,
    weights: WeightsReference,
    on_forecast: Callable[[float], bool] = lambda left: False,
) -> dict[str, float] | None:
    """Sample responses to every evaluation prompt and score them; None where no evaluation is due after the step.

    Args:
        on_forecast: see `RolloutTask`.

    Raises:
        StageFailedError: generation or preparation can't be done.
        UnscorableError: too few of the samples have a reward.
    """
    if run.spec.evaluation is None or not evaluation_due(run.spec, step, run.prompts.total_steps):
        return None
    recorded = run.folder.result("evaluation", step)
    if await asyncio.to_thread(artifacts.exists, recorded):
        result: dict[str, float] = await asyncio.to_thread(artifacts.read_json, recorded)
        return result
    prompts = list(range(len(run.prompts.tokens("evaluation"))))
    plan = run.plans.plan(prompts, run.spec.evaluation.samples_per_prompt, "evaluation")
    generated, prepared = GenerationOutcome(sinks=[]), PreparationOutcome()
    task = RolloutTask(step, "evaluation", SamplingWeights(weights), on_forecast=on_forecast)
    examples = evaluation_examples(prompts)
    await generate_and_prepare(run, task, plan, generated, prepared, examples)
    rewards = run.spec.evaluation_rewards
    check_unscorable(prepared.sums, rewards, run.spec.limits.unscorable, f"evaluation after step {step}")
    metrics = mean_metrics(prepared.sums)
    run.letting_actors_go.learn(metrics)
    evaluation = {"reward": 0.0, **metrics}
    fenced = journal.lease.fenced
    if step in (0, run.prompts.total_steps):
        when: When = "before" if step == 0 else "after"
        samples = sorted(prepared.examples, key=lambda example: example.row)
        await asyncio.to_thread(fenced, journal.samples.put, when, step, samples)
    await asyncio.to_thread(fenced, artifacts.write_json, recorded, evaluation)
    return evaluation
