"""Part of `measure.py`: our learner alone, its tokens a second and its share of the device's arithmetic."""

import statistics
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.accelerator import data_sheet_flops, device, device_name, matmul_flops, model_dtype, now
from benchmarks.gpu.flops import count_parameters, passed, training_flops
from benchmarks.gpu.shapes import SHAPES, WORK, model_settings
from benchmarks.learner.batches import Sample, draw_samples, learn_request, longest_sequence, prepared_samples

UPDATES = 5
"""The first of which does not count."""


def measure(name: str, model: Path) -> dict[str, Any]:
    """Updates on one batch: prompts that vary by a quarter, responses of which most are short, as in training."""
    from rlhfless_functions.learning.batch import TrainingBatch
    from rlhfless_functions.learning.state import autocast, initial_state
    from rlhfless_functions.learning.step import train_step

    work = WORK[name]
    # Twice a step's response: lengths then vary as much as for responses that end by themselves.
    response = 2 * work.response_tokens
    samples = draw_samples(
        work.prompts, prompt=work.prompt_tokens, response=response, vocabulary=SHAPES[name].vocabulary
    )
    settings = model_settings(model, model_dtype(), work.lora_rank)
    del settings["source"]
    request = learn_request(
        model,
        samples,
        response=response,
        microbatch_tokens=max(work.learner_tokens, longest_sequence(samples, response)),
        learning_rate=1e-6,
        total_steps=UPDATES,
        model=settings,
        learning={"gradient_checkpointing": work.checkpointing, "processes": 1},
    )
    state = initial_state(request)
    prepared = prepared_samples(samples)
    seconds = []
    for step in range(1, UPDATES + 1):
        began = now()
        report = train_step(state, TrainingBatch(prepared, request.algorithm, step), request, step, lambda: None)
        seconds.append(now() - began)
    weight = next(state.policy.parameters())
    with autocast(request, state.policy):
        arithmetic = torch.matmul(weight.new_zeros(1, 1), weight.new_zeros(1, 1)).dtype
    parameters = count_parameters(state.policy)
    done = passed(_groups(samples), share_prompts=report.shared_tokens > 0)
    if done.tokens != report.tokens:
        raise RuntimeError(f"the learner passed {report.tokens} tokens, and {done.tokens} were counted")
    needed, median = training_flops(parameters, done), statistics.median(seconds[1:])
    peaks = {"matmul": matmul_flops(arithmetic), "data_sheet": data_sheet_flops(device_name())}
    tokens = sum(len(sample.prompt_tokens) + len(sample.response_tokens) for sample in samples)
    return {
        "trained": f"an adapter of rank {work.lora_rank}" if work.lora_rank else "all weights",
        "arithmetic": str(arithmetic).removeprefix("torch."),
        "learning": request.learning.model_dump(mode="json"),
        "packed": state.packed,
        "samples": len(samples),
        "tokens": tokens,
        "tokens_passed": done.tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / median,
        "tokens_passed_per_second": done.tokens / median,
        "model_flops": needed,
        "flops_per_second": needed / median,
        "peak_flops": peaks,
        "mfu": needed / median / (peaks["data_sheet"] or peaks["matmul"]),
        "mfu_of": "the data sheet's peak" if peaks["data_sheet"] else "the fastest matrix product",
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device().type == "cuda" else None,
    }


def _groups(samples: list[Sample]) -> list[tuple[int, list[int]]]:
    """Tokens of each prompt and of the responses to it."""
    return [
        (len(members[0].prompt_tokens), [len(sample.response_tokens) for sample in members])
        for members in (list(group) for _, group in groupby(samples, key=lambda sample: sample.prompt))
    ]
