"""Measure how suited models are to early exit, for `rlhfless probe`: the same data, engine and draws as in training."""

import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.api.probe import (
    DraftedDecoding,
    ExitDrafts,
    LayerReadout,
    ModelProbe,
    Probe,
    ProbedModel,
    ProbeResult,
)
from rlhfless_functions.data.dataset_files import first_rows, read_tables
from rlhfless_functions.data.datasets import make_prompts
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.generation.early_exit.draft_speed import best_drafts
from rlhfless_functions.generation.early_exit.layers import find_layers
from rlhfless_functions.generation.early_exit.readouts import DrawnResponse, Readouts, read_out
from rlhfless_functions.generation.early_exit.self_drafting import MOST_ROWS, Decoded, Exit, SelfDrafting
from rlhfless_functions.generation.early_exit.suitability import settled, skippable, suitability
from rlhfless_functions.generation.engines.base import SequenceResult, SequenceTask
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.learning.checkpoints import restore_policy
from rlhfless_functions.runtime.device_memory import give_back
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling, ModelSettings, SamplingSettings
from rlhfless_functions.weights import (
    load_config,
    load_policy,
    load_tokenizer,
    longest_sequence,
    merge_adapter,
    publish_weights,
)

_USUAL_TOKENS = 256
_FIRST_ROWS = 4096
"""Most rows to tokenize, unless more prompts are asked for: a large dataset is not tokenized whole for a few of its
rows."""
_DECODED_RESPONSES = 8
"""Number of responses that are decoded with drafts and without."""
_ROUNDS = 3
"""Number of times that each is decoded; the fastest counts."""
_log = logging.getLogger(__name__)


def probe(asked: Probe) -> ProbeResult:
    """Probe one model after the other. The result includes the error of a model that can't be probed."""
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    found = []
    try:
        for number, each in enumerate(asked.models, start=1):
            _log.info("probing %s (%s of %s)", each.name, number, len(asked.models))
            with _whole_model(each) as model:
                found.append(_probe(each, model, asked))
            give_back()
    except (TaskError, artifacts.ArtifactError, ArithmeticError) as error:
        return ProbeResult(error=str(error))
    gpu = torch.cuda.is_available()
    return ProbeResult(
        models=found,
        device=torch.cuda.get_device_name() if gpu else "cpu",
        threads=None if gpu else torch.get_num_threads(),
    )


@contextmanager
def _whole_model(probed: ProbedModel) -> Iterator[ModelSettings]:
    """Give the settings of a plain Hugging Face folder: the model's own, or one made from a checkpoint."""
    if probed.checkpoint is None:
        yield probed.model.model_copy(update={"lora": None})
        return
    initial = WeightsReference(version=0, uri=probed.model.source)
    tokenizer = load_tokenizer(probed.model, initial)
    policy = load_policy(probed.model, initial, torch.float32)
    restore_policy(probed.checkpoint, policy)
    whole = merge_adapter(policy) if isinstance(policy, PeftModel) else policy
    with tempfile.TemporaryDirectory(prefix="rlhfless-") as root:
        folder = str(Path(root) / "model")
        publish_weights(folder, whole, tokenizer, torch.float32)
        del policy, whole
        yield probed.model.model_copy(update={"source": folder, "revision": None, "tokenizer": None, "lora": None})


def _probe(probed: ProbedModel, model: ModelSettings, asked: Probe) -> ModelProbe:
    weights = WeightsReference(version=0, uri=model.source)
    prompts, sampling = _prompts(model, weights, asked)
    tasks = [
        SequenceTask(prompt.row, index, prompt.tokens, sample_seed(asked.seed, "evaluation", 0, prompt.row, index))
        for prompt in prompts
        for index in range(asked.samples)
    ]
    results = _sample(model, weights, tasks, sampling)
    exits = find_layers(_loaded(model, weights), probed.name)
    responses = [
        DrawnResponse(task.prompt_tokens, results[task.prompt, task.index].response_tokens, task.seed) for task in tasks
    ]
    readouts = read_out(exits, responses, sampling.temperature)
    drafting = SelfDrafting(exits, sampling.temperature, sampling.max_response_tokens)
    times = drafting.times(_context(responses, longest_sequence(exits.model.config.get_text_config())))
    ways = best_drafts(readouts, times, sampling.max_response_tokens)
    fastest = max(ways, key=lambda way: way.speed, default=None)
    return ModelProbe(
        name=probed.name,
        step=probed.step,
        layers=exits.count,
        responses=len(responses),
        tokens=sum(readouts.lengths),
        suitability=suitability(readouts.drawn),
        skipped=skippable(readouts, asked.agreement),
        by_layer=_by_layer(readouts),
        exits=ways,
        plain_seconds=times.verify(1),
        best=fastest,
        pays=fastest is not None and fastest.speed > 1,
        decoded=_decode(drafting, tasks, results, fastest) if asked.draft and fastest is not None else None,
    )


def _prompts(model: ModelSettings, weights: WeightsReference, asked: Probe) -> tuple[list[Prompt], EngineSampling]:
    """Return the prompts to answer, and the sampling settings."""
    positions = longest_sequence(load_config(weights.uri, revision=model.revision).get_text_config())
    tokenizer = load_tokenizer(model, weights)
    longest = asked.max_response_tokens
    sampling = SamplingSettings(
        max_prompt_tokens=min(asked.max_prompt_tokens, positions - 1 if positions else asked.max_prompt_tokens),
        max_response_tokens=longest or 1,
        stop=asked.stop,
    )
    first = first_rows(read_tables(asked.data), max(_FIRST_ROWS, 2 * asked.prompts))
    prompts, _ = make_prompts(first, asked.data, sampling, tokenizer, positions)
    prompts = prompts[: asked.prompts]
    if longest is None:
        room = positions - max(len(prompt.tokens) for prompt in prompts) if positions else _USUAL_TOKENS
        longest = min(_USUAL_TOKENS, room)
    return prompts, EngineSampling(
        temperature=asked.temperature,
        max_prompt_tokens=sampling.max_prompt_tokens,
        max_response_tokens=longest,
        stop=asked.stop,
    )


def _sample(
    model: ModelSettings, weights: WeightsReference, tasks: Sequence[SequenceTask], sampling: EngineSampling
) -> dict[tuple[int, int], SequenceResult]:
    """Return the model's responses, by the transformers engine, which then gives its memory back."""
    engine = TransformersEngine()
    engine.load(model, weights)
    run = engine.start(tasks, sampling, None)
    results = []
    while run.running or run.waiting:
        results += run.step()
    engine.sleep()
    return {(result.prompt, result.index): result for result in results}


def _loaded(model: ModelSettings, weights: WeightsReference) -> PreTrainedModel:
    policy = load_policy(model, weights)
    assert not isinstance(policy, PeftModel)
    torch.nn.Module.to(policy, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return policy


def _context(responses: Sequence[DrawnResponse], positions: int | None) -> int:
    """Return the tokens before the timed one: as in the middle of a response, with room for drafts."""
    middle = responses[len(responses) // 2]
    context = len(middle.prompt) + len(middle.response) // 2
    return context if positions is None else max(0, min(context, positions - MOST_ROWS))


def _by_layer(readouts: Readouts) -> list[LayerReadout]:
    last = settled(readouts.drawn)
    return [
        LayerReadout(
            layer=number + 1,
            greedy=float(readouts.greedy[number].mean()),
            drawn=float(readouts.drawn[number].mean()),
            likeliest=float(readouts.likeliest[number].mean()),
            probability=float(readouts.probability[number].mean(dtype=float)),
            confidence=float(readouts.confidence[number].mean(dtype=float)),
            settled=float(last[number].mean()),
        )
        for number in range(len(readouts.drawn))
    ]


def _decode(
    drafting: SelfDrafting,
    tasks: Sequence[SequenceTask],
    results: dict[tuple[int, int], SequenceResult],
    way: ExitDrafts,
) -> DraftedDecoding:
    """Decode some responses with drafts and without, in alternation. The least time of each is the least disturbed
    one."""
    exit_ = Exit(way.layer, way.drafts, way.choice)
    chosen = tasks[:_DECODED_RESPONSES]
    seconds = {True: 0.0, False: 0.0}
    identical = tokens = passes = 0
    for task in chosen:
        drawn = results[task.prompt, task.index].response_tokens
        tried: dict[bool, list[Decoded]] = {True: [], False: []}
        for number in range(_ROUNDS):
            for drafts in (True, False) if number % 2 else (False, True):
                tried[drafts].append(drafting.decode(task, len(drawn), exit_ if drafts else None))
        for drafts, rounds in tried.items():
            seconds[drafts] += min(decoded.seconds for decoded in rounds)
        identical += tried[True][0].tokens == drawn
        tokens += len(drawn)
        passes += tried[True][0].passes
    return DraftedDecoding(
        responses=len(chosen),
        identical=identical,
        tokens=tokens,
        tokens_per_pass=tokens / passes,
        plain_tokens_per_second=tokens / seconds[False],
        tokens_per_second=tokens / seconds[True],
        speed=seconds[False] / seconds[True],
    )


def main() -> None:
    """Read a `Probe` from standard input and write its result into the named file.

    Standard output is left to the libraries.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    _log.setLevel(logging.INFO)
    transformers_logging.disable_progress_bar()
    result = probe(Probe.model_validate_json(sys.stdin.buffer.read()))
    Path(sys.argv[1]).write_text(result.model_dump_json())


if __name__ == "__main__":
    main()
