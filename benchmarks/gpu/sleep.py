"""Part of `measure.py`: functions that give their device's memory back between two requests, and take it again."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.accelerator import model_dtype, timed, used_bytes
from benchmarks.gpu.attempts import attempt
from benchmarks.gpu.engines import engine_settings, live_engines
from benchmarks.gpu.shapes import SHAPES, WORK, Work, model_settings
from benchmarks.learner.batches import draw_samples, learn_request, longest_sequence, prepared_samples
from rlhfless_functions.api import (
    BatchReference,
    GenerationRequest,
    LearnRequest,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.data.prompts import Prompt, write_prompts
from rlhfless_functions.data.rollouts import write_prepared
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.runtime.device_memory import give_back
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.settings import EngineName, ModelSettings, SamplingSettings

ROUNDS = 2
RESPONSE_TOKENS = 16


def measure(name: str, model: Path, scratch: Path) -> dict[str, Any]:
    """Generation with each engine there is, with the job's adapter where there is one, and the learner.

    Args:
        name: of the shape.
        model: its folder.
        scratch: for what they publish.
    """
    # As an instance does before it sleeps: it collects garbage, and modules are none.
    gc.freeze()
    settings = ModelSettings.model_validate(model_settings(model, model_dtype(), WORK[name].lora_rank))
    found = {}
    for engine in live_engines():
        sleeps = partial(_generation, engine, settings, WORK[name], scratch / engine)
        found[f"generation with {engine}"] = attempt(sleeps)
        give_back()
    return found | {"learning": attempt(lambda: _learning(name, model, scratch / "learning"))}


def _generation(engine: EngineName, model: ModelSettings, work: Work, folder: Path) -> dict[str, Any]:
    """Generate a share before each sleep and after the last. Keys and values are then part of what is held."""
    weights = WeightsReference(version=0, uri=model.source)
    sequence = work.prompt_tokens + RESPONSE_TOKENS
    settings = engine_settings(engine, sequence).model_copy(update={"sleeps": True})
    folder.mkdir(parents=True)
    prompts = str(folder / "prompts.parquet")
    write_prompts(prompts, [Prompt(row=0, tokens=[2 + place for place in range(work.prompt_tokens)], text="")])
    generator = Generator(settings=settings)
    before = used_bytes()
    started = timed(lambda: generator.preload(model, weights))
    rounds = []
    for number in range(ROUNDS + 1):
        request = GenerationRequest(
            key=TaskKey(job_uid="benchmark", step=number + 1, stage="generation", part="a", attempt=0),
            result=str(folder / f"result-{number}.json"),
            model=model,
            weights=weights,
            prompts=prompts,
            samples=[SampleTask(prompt=0, index=index) for index in range(8)],
            sampling=SamplingSettings(max_prompt_tokens=work.prompt_tokens, max_response_tokens=RESPONSE_TOKENS),
            seed=0,
            sink=str(folder / f"sink-{number}"),
            kv_budget_tokens=settings.kv_budget_tokens,
            engine=settings,
        )
        if generator.run(request, TaskContext(emit=lambda event: None)).unfinished:
            raise RuntimeError("the share was not generated to its end")
        if number < ROUNDS:
            held = used_bytes()
            sleep = timed(generator.sleep)
            freed = held - used_bytes()
            wake = timed(lambda: generator.preload(model, weights))
            rounds.append(
                {"sleep_seconds": sleep, "wake_seconds": wake, "freed_bytes": freed, "held_bytes": held - before}
            )
    generator.sleep()
    return {"start_seconds": started} | rounds[-1] | {"rounds": rounds}


def _learning(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """Two steps on one small batch, with a sleep between them."""
    work = WORK[name]
    samples = draw_samples(1, prompt=work.prompt_tokens, response=RESPONSE_TOKENS, vocabulary=SHAPES[name].vocabulary)
    given = model_settings(model, model_dtype(), work.lora_rank)
    del given["source"]
    request = learn_request(
        model,
        samples,
        response=RESPONSE_TOKENS,
        microbatch_tokens=len(samples) * longest_sequence(samples, RESPONSE_TOKENS),
        learning_rate=1e-6,
        total_steps=2,
        model=given,
        learning={"gradient_checkpointing": work.checkpointing, "processes": 1},
    )
    folder.mkdir(parents=True)
    part = str(folder / "batch.parquet")
    write_prepared(part, prepared_samples(samples))
    keys = [SampleTask(prompt=sample.prompt, index=sample.index) for sample in samples]
    batches = [BatchReference(step=step, parts=[part], samples=keys) for step in (1, 2)]
    context = TaskContext(emit=lambda event: None)
    learner, before = Learner(), used_bytes()
    first = learner.run(_learn(request, folder, 1, request.base, batches), context)
    held = used_bytes()
    sleep = timed(learner.sleep)
    freed = held - used_bytes()
    second = learner.run(_learn(request, folder, 2, first.weights, batches), context)
    learner.close()
    return {
        "start_seconds": first.metrics["seconds/load"],
        "sleep_seconds": sleep,
        # On a CPU the state stays where it is.
        "wake_seconds": second.metrics.get("seconds/wake", 0.0),
        "freed_bytes": freed,
        "held_bytes": held - before,
    }


def _learn(
    request: LearnRequest, folder: Path, step: int, base: WeightsReference, batches: list[BatchReference]
) -> LearnRequest:
    return request.model_copy(
        update={
            "key": request.key.model_copy(update={"step": step}),
            "result": str(folder / f"result-{step}.json"),
            "base": base,
            "batch": batches[step - 1],
            "replay": batches[: step - 1],
            "publish": str(folder / f"weights-{step}"),
        }
    )
