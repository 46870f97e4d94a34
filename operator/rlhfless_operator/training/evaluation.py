"""Mean reward of one weights version on prompts that are not trained on."""

import asyncio

from rlhfless_functions import artifacts
from rlhfless_functions.api import ExampleSample, WeightsReference
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.journal import JsonLines, mean_metrics, read_lines
from rlhfless_operator.training.generated import GenerationOutcome
from rlhfless_operator.training.lease import Lease
from rlhfless_operator.training.preparation import PreparationOutcome
from rlhfless_operator.training.rollout import RolloutTask, generate_and_prepare
from rlhfless_operator.training.run import TrainingRun


def evaluation_due(spec: RLHFJobSpec, step: int, total_steps: int) -> bool:
    """Whether the weights after `step` are evaluated."""
    if spec.evaluation is None:
        return False
    every = spec.evaluation.every_steps
    return step in (0, total_steps) or (every is not None and step % every == 0)


async def evaluate(run: TrainingRun, lease: Lease, step: int, weights: WeightsReference) -> dict[str, float] | None:
    """Sample responses to every evaluation prompt and score them; None where no evaluation is due after the step.

    Args:
        lease: the fence of what is written.

    Raises:
        StageFailedError: generation or preparation can't be done.
    """
    if run.spec.evaluation is None or not evaluation_due(run.spec, step, run.prompts.total_steps):
        return None
    recorded = run.folder.result("evaluation", step)
    if artifacts.exists(recorded):
        result: dict[str, float] = artifacts.read_json(recorded)
        return result
    prompts = list(range(run.prompts.open("evaluation")))
    plan = run.plans.plan(prompts, run.spec.evaluation.samples_per_prompt, "evaluation")
    generated, prepared = GenerationOutcome(sinks=[]), PreparationOutcome()
    await generate_and_prepare(run, RolloutTask(step, "evaluation", weights), plan, generated, prepared)
    metrics = mean_metrics(prepared.sums)
    evaluation = {"accuracy": metrics.get("reward", 0.0), **metrics}
    await asyncio.to_thread(lease.check)
    if step in (0, run.prompts.total_steps):
        when = "before" if step == 0 else "after"
        await asyncio.to_thread(_write_examples, run.folder, when, prepared.examples)
    await asyncio.to_thread(artifacts.write_json, recorded, evaluation)
    return evaluation


def _write_examples(folder: JobFolder, when: str, examples: list[ExampleSample]) -> None:
    uri = folder.file("samples.jsonl")
    examples = sorted(examples, key=lambda example: example.prompt)
    kept = [line for line in read_lines(uri) if line["when"] != when]
    JsonLines(uri, kept).append(*({"when": when, **example.model_dump()} for example in examples))
