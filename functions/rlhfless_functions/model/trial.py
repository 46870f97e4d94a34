"""Trials of a model when it is first loaded: our passes against its own forward pass, on a few short samples.

An architecture may put into its masks, positions or cache what our passes do not know, and would then compute other
numbers without an error. What differs is computed the plain way, or the model is refused, by name.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhfless_functions.model.output_head import causal_model, check_output_logits
from rlhfless_functions.runtime.task import TaskError

TRIAL_LENGTHS = (20, 3)
"""Tokens of a trial's samples: one is longer than the window of small models, and the other needs padding."""


def trial_samples(model: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    """Return tokens from all over the model's vocabulary, which repeat in no pattern."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.linspace(0, vocabulary - 1, 2 * sum(lengths) + 1).long()[1:]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[: sum(lengths)]
    return [piece.tolist() for piece in ids[order].split(list(lengths))]


def own_hidden(body: PreTrainedModel, sample: Sequence[int]) -> torch.Tensor:
    """Return the final hidden states of one sample by the model's own forward pass, [tokens, H]."""
    hidden: torch.Tensor = body(
        input_ids=torch.tensor([list(sample)], device=body.device), use_cache=False
    ).last_hidden_state
    return hidden[0]


def differs(ours: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether numbers differ by more than rounding, relative to their size.

    Numbers that are not finite by the model's own pass are left out: the weights are at fault then, and the first real
    pass says so.

    Args:
        ours: by our pass.
        own: by the model's own.
        dtype: in which both were computed.
    """
    finite = own.isfinite()
    if not finite.any():
        return False
    ours, own = ours.float()[finite], own.float()[finite]
    distance = float((ours - own).square().mean().sqrt() / own.square().mean().sqrt().clamp(min=1e-30))
    return not distance <= (1e-3 if dtype == torch.float32 else 0.1)


@torch.no_grad()
def check_passes(model: nn.Module, uri: str) -> None:
    """Check that a model's passes over padded rows, and its logits, are those of its own forward pass.

    Args:
        model: a causal language model of transformers, with or without a peft adapter.
        uri: its weights, for the message.

    Raises:
        TaskError: `model_unloadable` for an architecture that computes otherwise, or can't be computed so.
    """
    causal = causal_model(model)
    try:
        check_output_logits(model)
        problem = _padding_changes(causal.base_model)
    except torch.OutOfMemoryError:
        raise
    except ValueError as error:
        raise TaskError("model_unloadable", f"{uri}: {error}") from error
    except Exception as error:
        raise TaskError("model_unloadable", f"{uri}: {told(causal, error)}") from error
    if problem:
        raise TaskError(
            "model_unloadable",
            f"{uri}: {type(causal).__name__} gives a sample other numbers if a longer one is beside it;"
            " use a model of another architecture",
        )


def told(model: PreTrainedModel, error: Exception) -> str:
    """Say that a model can't be computed, with the first line of the error."""
    first = str(error).strip().split("\n")[0]
    return (
        f"{type(model).__name__} can't be computed in the passes of training ({type(error).__name__}: {first});"
        " use a model of another architecture"
    )


def _padding_changes(body: PreTrainedModel) -> bool:
    samples = trial_samples(body, TRIAL_LENGTHS)
    own = torch.cat([own_hidden(body, sample) for sample in samples])
    width = max(map(len, samples))
    rows = [[*sample, *[0] * (width - len(sample))] for sample in samples]
    padded = body(input_ids=torch.tensor(rows, device=body.device), use_cache=False).last_hidden_state
    ours = torch.cat([padded[row, : len(sample)] for row, sample in enumerate(samples)])
    return differs(ours, own, body.dtype)
