"""A trial of the engine's passes when a model is first loaded: they must give the logits of its own forward pass."""

import torch
from transformers import PreTrainedModel

from rlhfless_functions.generation.engines.attention import Masks, use_grouped_attention
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.kv_cache import SlotCache, padded
from rlhfless_functions.generation.engines.passes import ModelPasses, padded_rows
from rlhfless_functions.model.trial import TRIAL_LENGTHS, differs, trial_samples
from rlhfless_functions.runtime.task import TaskError

_DECODED = 4
"""Tokens that a trial decodes after each prompt."""


@torch.inference_mode()
def check_engine(model: PreTrainedModel, masks: Masks, uri: str) -> None:
    """Compare prefill and decoding with the model's own forward pass, on a few short samples.

    Args:
        model: on its device, in evaluation mode, with grouped attention.
        masks: of the model.
        uri: its weights, for the message.

    Raises:
        TaskError: `model_unloadable` if the numbers differ, or the model can't be computed so.
    """
    samples = trial_samples(model, [length + _DECODED for length in TRIAL_LENGTHS])
    name = type(model).__name__
    try:
        ours = _decoded(model, masks, samples)
        model.set_attn_implementation("sdpa")
        own = torch.stack([_own(model, sample) for sample in samples])
        use_grouped_attention(model)
    except (TaskError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".split("\n")[0]
        raise TaskError(
            "model_unloadable",
            f"{uri}: the transformers engine can't generate with {name} ({problem}); set generation.engine to vllm, or"
            " use a model of another architecture",
        ) from error
    if differs(ours, own, model.dtype):
        raise TaskError(
            "model_unloadable",
            f"{uri}: the transformers engine computes other logits than {name} itself, so its samples would not be the"
            " model's; set generation.engine to vllm, or use a model of another architecture",
        )


def _own(model: PreTrainedModel, sample: list[int]) -> torch.Tensor:
    """Return the logits of the decoded tokens by the model's own pass, [tokens, vocabulary]."""
    logits: torch.Tensor = model(input_ids=torch.tensor([sample], device=model.device), use_cache=False).logits
    return logits[0, -_DECODED:]


def _decoded(model: PreTrainedModel, masks: Masks, samples: list[list[int]]) -> torch.Tensor:
    """Return the same by the engine's passes, [samples, tokens, vocabulary]: prompts whole, then a token a pass."""
    rows = padded_rows(len(samples), model.device)
    cache = SlotCache(rows, padded(max(map(len, samples))))
    passes = ModelPasses(model, masks, cache)
    # All rows are samples, as padding repeats the last.
    of_row = [samples[min(row, len(samples) - 1)] for row in range(rows)]
    tasks = {
        row: SequenceTask(min(row, len(samples) - 1), row, sample[: 1 - _DECODED], seed=0)
        for row, sample in enumerate(of_row)
    }
    passes.prefill(tasks)
    found = []
    for step in range(_DECODED):
        places = [len(sample) - _DECODED + step for sample in of_row]
        inputs = torch.tensor(
            [sample[place] for sample, place in zip(of_row, places, strict=True)], device=model.device
        )
        positions = torch.tensor(places, device=model.device)
        cache.decode(positions, cache.capacity)
        found.append(passes.forward(inputs, positions, cache.capacity)[: len(samples)])
    return torch.stack(found, dim=1)
