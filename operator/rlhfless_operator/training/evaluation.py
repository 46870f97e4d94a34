"""Mean reward of one weights version on prompts that are not trained on."""

import asyncio

from rlhfless_functions import artifacts
from rlhfless_functions.api import ExampleSample, WeightsReference
from rlhfless_operator.records.journal import JsonLines, mean_metrics, read_lines
from rlhfless_operator.training.generated import GenerationOutcome
from rlhfless_operator.training.preparation import PreparationOutcome
from rlhfless_operator.training.rollout import generate_and_prepare
from rlhfless_operator.training.run import TrainingRun


async def evaluate(run: TrainingRun, step: int, weights: WeightsReference) -> dict[str, float]:
    """Sample responses to every evaluation prompt and score them.

    Raises:
        StageFailedError: generation or preparation can't be done.
    """
    assert run.spec.evaluation is not None
    recorded = run.folder.result("evaluation", step)
    if artifacts.exists(recorded):
        result: dict[str, float] = artifacts.read_json(recorded)
        return result
    prompts = list(range(run.open_data("evaluation")))
    plan = run.plan(prompts, run.spec.evaluation.samples_per_prompt, "evaluation")
    generated, prepared = GenerationOutcome(sinks=[]), PreparationOutcome()
    await generate_and_prepare(run, step, "evaluation", weights, plan, generated, prepared)
    metrics = mean_metrics(prepared.sums)
    evaluation = {"accuracy": metrics.get("reward", 0.0), **metrics}
    await asyncio.to_thread(run.lease.check)
    if step in (0, run.total_steps):
        when = "before" if step == 0 else "after"
        await asyncio.to_thread(_write_examples, run, when, prepared.examples)
    await asyncio.to_thread(artifacts.write_json, recorded, evaluation)
    return evaluation


def _write_examples(run: TrainingRun, when: str, examples: list[ExampleSample]) -> None:
    uri = run.folder.file("samples.jsonl")
    examples = sorted(examples, key=lambda example: example.prompt)
    kept = [line for line in read_lines(uri) if line["when"] != when]
    JsonLines(uri, kept).append(*({"when": when, **example.model_dump()} for example in examples))
