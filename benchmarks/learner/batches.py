"""Groups of random samples and the learning request that trains on them, for the benchmarks of the learner."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfless_functions.api import LearnRequest
    from rlhfless_functions.data.rollouts import PreparedSample

SAMPLES_PER_PROMPT = 8


@dataclass(frozen=True)
class Sample:
    """A response with its advantage; those of a group have one prompt."""

    prompt: int
    index: int
    prompt_tokens: list[int]
    response_tokens: list[int]
    advantage: float


def draw_samples(groups: int, *, prompt: int, response: int, vocabulary: int) -> list[Sample]:
    """The same samples for the same arguments.

    Args:
        groups: of eight samples each.
        prompt: mean tokens of a prompt; they vary by a quarter.
        response: longest response; their lengths are spread as in training, most of them short.
        vocabulary: tokens of the model, of which the first two are padding and the end.
    """
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(count)]

    samples = []
    for number in range(groups):
        prompt_tokens = tokens(round(prompt * draw.uniform(0.75, 1.25)))
        for index in range(SAMPLES_PER_PROMPT):
            length = min(response, max(8, round(draw.lognormvariate(0, 0.6) * response / 3)))
            samples.append(Sample(number, index, prompt_tokens, tokens(length), draw.gauss(0, 1)))
    return samples


def longest_sequence(samples: list[Sample], response: int) -> int:
    """Tokens of the longest prompt with the longest response that there may be."""
    return max(len(sample.prompt_tokens) for sample in samples) + response


def learn_request(
    folder: Path,
    samples: list[Sample],
    *,
    response: int,
    microbatch_tokens: int,
    learning_rate: float,
    total_steps: int,
    model: dict[str, Any],
    learning: dict[str, Any],
) -> "LearnRequest":
    """A request for one GRPO update a step on these samples, without importance weights, as TRL without vLLM.

    Args:
        folder: of the model.
        samples: of every step.
        response: longest response.
        microbatch_tokens: of a forward and backward pass.
        learning_rate: constant.
        total_steps: of the job.
        model: further fields of `ModelSettings`.
        learning: fields of `LearningSettings`.
    """
    from rlhfless_functions.api import BatchReference, LearnRequest, SampleTask, TaskKey, WeightsReference
    from rlhfless_functions.settings import (
        AlgorithmSettings,
        BatchSettings,
        LearningSettings,
        ModelSettings,
        OptimizerSettings,
        SamplingSettings,
    )

    weights = WeightsReference(version=0, uri=str(folder))
    algorithm = AlgorithmSettings().resolved()
    uncorrected = algorithm.importance_sampling.model_copy(update={"mode": "none"})
    return LearnRequest(
        key=TaskKey(job_uid="benchmark", step=1, stage="learning", part="learn", attempt=0),
        result="",
        model=ModelSettings(source=str(folder), **model),
        initial=weights,
        base=weights,
        batch=BatchReference(step=1, parts=[""], samples=[SampleTask(prompt=0, index=0)]),
        algorithm=algorithm.model_copy(update={"importance_sampling": uncorrected}),
        optimizer=OptimizerSettings(learning_rate=learning_rate, max_gradient_norm=1e9),
        batch_settings=BatchSettings(
            prompts_per_step=len(samples) // SAMPLES_PER_PROMPT,
            samples_per_prompt=SAMPLES_PER_PROMPT,
            microbatch_tokens=microbatch_tokens,
        ),
        sampling=SamplingSettings(max_response_tokens=response),
        learning=LearningSettings(**learning),
        total_steps=total_steps,
        seed=0,
        publish="",
    )


def prepared_samples(samples: list[Sample]) -> "list[PreparedSample]":
    """The same samples as preparation hands them to the learner."""
    from rlhfless_functions.data.rollouts import PreparedSample, VersionSpan

    return [
        PreparedSample(
            prompt=sample.prompt,
            index=sample.index,
            prompt_tokens=sample.prompt_tokens,
            response_tokens=sample.response_tokens,
            log_probs=[0.0] * len(sample.response_tokens),
            finish_reason="stop",
            versions=[VersionSpan(0, 0, len(sample.response_tokens))],
            reward=sample.advantage,
            advantages=[sample.advantage] * len(sample.response_tokens),
        )
        for sample in samples
    ]
