"""Samples that come back into the batch: their bits do not depend on the samples beside them."""

import json
import random
from collections import Counter

import pytest
import torch
from transformers import AutoTokenizer

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.engines.base import SequenceResult, SequenceTask
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.settings import ModelSettings, SamplingSettings
from tests.figures import ROOT

MODEL = ROOT / "examples" / "tools" / "model"
SAMPLING = SamplingSettings(max_prompt_tokens=96, max_response_tokens=72)
TURNS, ANSWER = 3, 6


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    """The engine with the example's model and, as the promise says, one thread."""
    torch.set_num_threads(1)
    engine = TransformersEngine()
    engine.load(ModelSettings(source=str(MODEL), dtype="float32"), WeightsReference(version=0, uri=str(MODEL)))
    return engine


def first_turns(prompts: int = 5, samples: int = 4) -> list[SequenceTask]:
    """Samples of the example's prompts, whose turns are short."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = (MODEL.parent / "train.jsonl").read_text().splitlines()[:prompts]
    texts = [tokenizer.apply_chat_template(json.loads(line)["prompt"], add_generation_prompt=True) for line in lines]
    return [
        SequenceTask(prompt, index, list(text["input_ids"]), sample_seed(0, "training", 1, prompt, index))
        for prompt, text in enumerate(texts)
        for index in range(samples)
    ]


def answered(task: SequenceTask, result: SequenceResult) -> SequenceTask:
    """The sample with an answer, which depends on what it said alone."""
    numbers = random.Random(repr((result.prompt, result.index, result.response_tokens)))
    given = [numbers.randrange(2, 100) for _ in range(ANSWER)]
    tokens, log_probs = [*result.response_tokens, *given], [*result.log_probs, *[0.0] * ANSWER]
    return SequenceTask(task.prompt, task.index, task.prompt_tokens, task.seed, tokens, log_probs)


def play(engine: TransformersEngine, tasks: list[SequenceTask], delay: int) -> dict[tuple[int, int], SequenceResult]:
    """Play the turns of samples that come back after up to `delay` steps, in any order."""
    numbers, finished = random.Random(delay), dict[tuple[int, int], SequenceResult]()
    by_key = {(task.prompt, task.index): task for task in tasks}
    turns, away = Counter[tuple[int, int]](), list[tuple[int, SequenceTask]]()
    run, step = engine.start(tasks, SAMPLING, None), 0
    while run.running or run.waiting or away:
        step += 1
        back = [task for at, task in away if at <= step]
        away = [(at, task) for at, task in away if at > step]
        for task in numbers.sample(back, len(back)):
            run.add(task, returns=True)
        for result in run.step():
            key = (result.prompt, result.index)
            turns[key] += 1
            full = len(result.response_tokens) + ANSWER >= SAMPLING.max_response_tokens
            if turns[key] == TURNS or full:
                finished[key] = result
            else:
                away.append((step + numbers.randint(0, delay), answered(by_key[key], result)))
    return finished


def test_samples_that_come_back_have_the_same_bits_in_any_batch(engine: TransformersEngine) -> None:
    tasks = first_turns()
    whole = play(engine, tasks, delay=0)
    assert len(whole) == len(tasks)
    parts: dict[tuple[int, int], SequenceResult] = {}
    for actor in range(3):
        parts |= play(engine, tasks[actor::3], delay=3)
    assert parts == whole
