"""The read-out of each layer where the whole model drew a token: a pass over known responses, a layer at a time.

The read-out of a layer is the distribution that the final norm and the head make of its output (the logit lens). A few
numbers of it are kept for each layer and token. Logits exist for one chunk of tokens of one layer at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlhfless_functions.generation.early_exit.layers import ExitLayers
from rlhfless_functions.generation.engines.randomness import signed_keys, uniforms
from rlhfless_functions.generation.engines.sampling import choose, likeliest
from rlhfless_functions.model.forward import collate

PASS_TOKENS = 4096
"""Most tokens of a pass, padding included, unless one sequence has more."""
CHUNK_LOGITS = 2**23
"""Numbers in the logits that are held at once; a chunk takes about 20 bytes for each."""


@dataclass(frozen=True)
class DrawnResponse:
    """A prompt with the response that the whole model has drawn."""

    prompt: Sequence[int]
    response: Sequence[int]
    seed: int
    """64-bit key of the sample's random numbers."""


@dataclass(frozen=True)
class Readouts:
    """Numbers for each layer and response token. Arrays are [layers, tokens], with all responses in a row."""

    drawn: np.ndarray
    """bool: the same random number draws the same token from this layer's read-out."""
    likeliest: np.ndarray
    """bool: the read-out's likeliest token is the one that the whole model drew."""
    greedy: np.ndarray
    """bool: the read-out's likeliest token is the whole model's likeliest."""
    probability: np.ndarray
    """float32: the read-out's probability of the token that the whole model drew."""
    confidence: np.ndarray
    """float32: the read-out's probability of its likeliest token."""
    lengths: Sequence[int]
    """Tokens of each response."""


@torch.inference_mode()
def read_out(exits: ExitLayers, sequences: Sequence[DrawnResponse], temperature: float) -> Readouts:
    """Pass responses through the model, and read out every layer.

    Args:
        exits: layers of a model in evaluation mode, with the attention that it was loaded with.
        sequences: the responses, each with at least one token.
        temperature: temperature at which they were sampled; 0 for the likeliest tokens, with probabilities at 1.
    """
    parts = [_read_batch(exits, batch, temperature) for batch in _batches(sequences)]
    joined = {
        name: np.concatenate([part[name] for part in parts], axis=1)
        for name in ("drawn", "likeliest", "best", "probability", "confidence")
    }
    best = joined.pop("best")
    return Readouts(**joined, greedy=best == best[-1], lengths=[len(each.response) for each in sequences])


def _batches(sequences: Sequence[DrawnResponse]) -> Iterator[list[DrawnResponse]]:
    batch: list[DrawnResponse] = []
    longest = 0
    for each in sequences:
        length = len(each.prompt) + len(each.response)
        if batch and max(longest, length) * (len(batch) + 1) > PASS_TOKENS:
            yield batch
            batch, longest = [], 0
        batch.append(each)
        longest = max(longest, length)
    if batch:
        yield batch


def _read_batch(exits: ExitLayers, sequences: Sequence[DrawnResponse], temperature: float) -> dict[str, np.ndarray]:
    model, device = exits.model, exits.model.device
    batch = collate([each.prompt for each in sequences], [each.response for each in sequences], 0).to(device)
    targets = batch.response_ids[batch.response_mask]
    keys = torch.tensor(signed_keys([each.seed for each in sequences]), device=device)
    responses, columns = batch.response_mask.nonzero(as_tuple=True)
    noise = uniforms(keys[responses], columns)
    rows = max(1, CHUNK_LOGITS // model.config.get_text_config().vocab_size)
    found: list[dict[str, np.ndarray]] = []

    def see(layer: int, output: torch.Tensor) -> None:
        hidden = output.reshape(-1, output.shape[-1])[batch.positions]
        chunks = zip(hidden.split(rows), targets.split(rows), noise.split(rows), strict=True)
        read = [_read_chunk(exits.logits(states), *others, temperature) for states, *others in chunks]
        found.append({name: np.concatenate([chunk[name] for chunk in read]) for name in read[0]})

    with exits.watched(see):
        model.base_model(input_ids=batch.input_ids, use_cache=False)
    return {name: np.stack([layer[name] for layer in found]) for name in found[0]}


def _read_chunk(
    logits: torch.Tensor, targets: torch.Tensor, noise: torch.Tensor, temperature: float
) -> dict[str, np.ndarray]:
    log_probs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    best, sound = likeliest(log_probs)
    drawn = choose(log_probs, noise)[0] if temperature else best
    probability, confidence = (log_probs.gather(1, ids[:, None])[:, 0].exp() for ids in (targets, best))
    return {
        "drawn": ((drawn == targets) & sound).cpu().numpy(),
        "likeliest": ((best == targets) & sound).cpu().numpy(),
        # A read-out that is not a distribution agrees with no token.
        "best": torch.where(sound, best, -1).to(torch.int32).cpu().numpy(),
        "probability": probability.nan_to_num(0.0).cpu().numpy(),
        "confidence": confidence.nan_to_num(0.0).cpu().numpy(),
    }
