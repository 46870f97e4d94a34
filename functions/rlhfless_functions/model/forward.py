"""Forward passes over ragged batches of prompts with responses, shared by preparation and learning.

A batch is either padded or packed. A padded batch is right-padded and starts at position 0. Under causal attention no
token sees the tokens to its right, so the passes need no attention mask, and a row's numbers do not depend on other
rows. In a packed batch all samples are in one row without padding, and each sees only itself (`packed_attention.py`).
Logits are computed only for response tokens, in float32 from the head on (as ScaleRL, arXiv 2510.13786, recommends).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rlhfless_functions.model.output_head import causal_model, token_log_probs
from rlhfless_functions.model.packed_attention import packed_hidden
from rlhfless_functions.model.packing import Packing
from rlhfless_functions.model.shared_prompts import PackedResponses, ResponseBatch, SharedPrompts
from rlhfless_functions.weights.critic import CriticModel

PASS_OVERHEAD_TOKENS = 128
"""Fixed cost of one more forward pass, in tokens. Another pass pays only if it saves more padding than this."""


@dataclass(frozen=True)
class RaggedBatch:
    """n prompts with their responses; T is the longest input, or all inputs in a packed row, R the longest response."""

    input_ids: torch.Tensor
    """[n, T], or packed [1, T], token ids: prompt and response without its last token, which predicts nothing."""
    response_ids: torch.Tensor
    """[n, R] token ids of the responses."""
    response_mask: torch.Tensor
    """[n, R] bool: True on the tokens of the response that get a number: all but given ones. False on padding."""
    positions: torch.Tensor
    """[number of these tokens] index into `input_ids.flatten()` of the token before each."""
    packing: Packing | None = None
    """Positions of the samples, if they are packed."""

    def to(self, device: torch.device) -> "RaggedBatch":
        """Return the same batch on another device."""
        return RaggedBatch(
            self.input_ids.to(device),
            self.response_ids.to(device),
            self.response_mask.to(device),
            self.positions.to(device),
            self.packing,
        )

    def only(self, sampled: torch.Tensor) -> "RaggedBatch":
        """Return the batch with numbers for these response tokens alone, [n, R] bool. The others are still read."""
        return replace(self, response_mask=sampled, positions=self.positions[sampled[self.response_mask]])


def collate(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int, *, packed: bool = False
) -> RaggedBatch:
    """Right-pad prompts with their responses into one batch, or put them into one row.

    Args:
        prompts: token ids of each prompt, at least one.
        responses: token ids of each response; may be empty.
        pad_id: any token id of the vocabulary; no result depends on it.
        packed: whether to put them into one row.
    """
    if not all(prompts):
        raise ValueError("a prompt has no tokens: there is nothing before the first response token")
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    response_lengths = torch.tensor([len(response) for response in responses])
    rows = [[*prompt, *response[:-1]] for prompt, response in zip(prompts, responses, strict=True)]
    packing = Packing([len(row) for row in rows]) if packed else None
    input_ids = torch.tensor([list(chain(*rows))]) if packed else _right_pad(rows, pad_id)
    response_ids = _right_pad(responses, pad_id)
    steps = torch.arange(response_ids.shape[1])
    response_mask = steps < response_lengths[:, None]
    row_starts = torch.arange(len(rows)) * input_ids.shape[1] if packing is None else packing.starts
    first = row_starts + prompt_lengths - 1
    return RaggedBatch(input_ids, response_ids, response_mask, (first[:, None] + steps)[response_mask], packing)


def collate_responses(
    prompts: Sequence[int], responses: Sequence[Sequence[int]], pad_id: int, *, packed: bool = False
) -> ResponseBatch:
    """Right-pad responses into one batch.

    Args:
        prompts: index of each response's prompt among the shared prompts.
        responses: token ids of each response; may be empty.
        pad_id: any token id of the vocabulary; no result depends on it.
        packed: whether to put their inputs into one row.
    """
    lengths = torch.tensor([len(response) for response in responses])
    response_ids = _right_pad(responses, pad_id)
    mask = torch.arange(response_ids.shape[1]) < lengths[:, None]
    inputs = PackedResponses.of(prompts, responses) if packed else None
    return ResponseBatch(torch.tensor(list(prompts)), response_ids, mask, inputs)


def _right_pad(rows: Sequence[Sequence[int]], pad_id: int) -> torch.Tensor:
    width = max(map(len, rows), default=0)
    return torch.from_numpy(
        np.array([[*row, *[pad_id] * (width - len(row))] for row in rows], dtype=np.int64).reshape(len(rows), width)
    )


def packed_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Divide samples into packed rows by first fit, the longest sample first.

    The result depends only on the arguments.

    Args:
        lengths: tokens of each sample, prompt and response.
        budget_tokens: most tokens of a row; a longer sample is a row of its own.

    Returns:
        Indices into `lengths`, the fullest row first: then memory peaks at the start.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        for number, left in enumerate(room):
            if lengths[index] <= left:
                rows[number].append(index)
                room[number] -= lengths[index]
                break
        else:
            rows.append([index])
            room.append(budget_tokens - lengths[index])
    return [rows[number] for number in sorted(range(len(rows)), key=lambda number: (room[number], number))]


def micro_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Divide samples into micro-batches that compute the fewest tokens, padding included.

    Samples are sorted by length and cut into runs. Of all cuts, this takes the one with the fewest padded tokens plus
    `PASS_OVERHEAD_TOKENS` a run. The result depends only on the arguments.

    Args:
        lengths: tokens of each sample, prompt and response.
        budget_tokens: most tokens of a micro-batch, padding included; a longer sample is a micro-batch of its own.

    Returns:
        Indices into `lengths`, longest micro-batch first: then memory peaks at the start.
    """
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    cost = np.zeros(len(order) + 1)
    start_of_run = [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        longest = max(1, lengths[order[end - 1]])
        earliest = end - min(end, max(1, budget_tokens // longest))
        starts = np.arange(earliest, end)
        costs = cost[earliest:end] + longest * (end - starts) + PASS_OVERHEAD_TOKENS
        best = int(np.argmin(costs))
        cost[end] = costs[best]
        start_of_run[end] = earliest + best
    runs = []
    end = len(order)
    while end:
        runs.append(order[start_of_run[end] : end])
        end = start_of_run[end]
    return runs


def cost_of(runs: Sequence[Sequence[int]], lengths: Sequence[int], *, packed: bool = False) -> int:
    """Return the number of tokens that runs of `micro_batches` or `packed_batches` compute, plus the fixed cost of each
    pass."""
    if packed:
        return sum(lengths[index] for run in runs for index in run) + PASS_OVERHEAD_TOKENS * len(runs)
    return sum(len(run) * max(1, *(lengths[index] for index in run)) + PASS_OVERHEAD_TOKENS for run in runs)


def response_log_probs(
    model: nn.Module,
    batch: RaggedBatch | ResponseBatch,
    temperature: float,
    *,
    prompts: SharedPrompts | None = None,
    entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities of the response tokens under the model at a temperature, with autograd.

    Args:
        model: a causal language model of transformers, with or without a peft adapter.
        batch: on the model's device.
        temperature: divides the float32 logits; above 0.
        prompts: of the model's body, if the batch holds only responses.
        entropy: whether to return the distributions' entropy as well.
        entropy_gradient: whether gradients flow through it.
        chunk_tokens: tokens whose logits over the whole vocabulary are held at once; by default from the vocabulary's
            size.

    Returns:
        log-probabilities and entropies in nats, float32 [n, R]; 0 on padding.
    """
    log_probs, entropies = token_log_probs(
        model,
        _hidden_before_responses(causal_model(model).base_model, batch, prompts),
        batch.response_ids[batch.response_mask],
        temperature,
        entropy=entropy,
        entropy_gradient=entropy_gradient,
        chunk_tokens=chunk_tokens,
    )
    return _unflatten(log_probs, batch), None if entropies is None else _unflatten(entropies, batch)


def response_values(
    critic: CriticModel, batch: RaggedBatch | ResponseBatch, prompts: SharedPrompts | None = None
) -> torch.Tensor:
    """Return the critic's value of the state before each response token, float32 [n, R], with autograd; 0 on padding.

    Args:
        critic: the body and its head.
        batch: on the critic's device.
        prompts: of the critic's body, if the batch holds only responses.
    """
    hidden = _hidden_before_responses(critic.body, batch, prompts)
    with torch.autocast(hidden.device.type, enabled=False):
        values = critic.score(hidden.float())
    return _unflatten(values.squeeze(-1), batch)


def body_of(model: nn.Module) -> PreTrainedModel:
    """Return the transformer below a policy's or a critic's head."""
    return model.body if isinstance(model, CriticModel) else causal_model(model).base_model


def _hidden_before_responses(
    body: nn.Module, batch: RaggedBatch | ResponseBatch, prompts: SharedPrompts | None
) -> torch.Tensor:
    if isinstance(batch, ResponseBatch):
        assert prompts is not None, "responses alone need their prompts"
        return prompts.hidden_before(batch)
    if batch.packing is not None:
        hidden = packed_hidden(body, batch.input_ids, batch.packing)
    else:
        hidden = body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, batch.positions)


def _unflatten(flat: torch.Tensor, batch: RaggedBatch | ResponseBatch) -> torch.Tensor:
    zeros = torch.zeros(batch.response_mask.shape, dtype=flat.dtype, device=flat.device)
    return zeros.masked_scatter(batch.response_mask, flat)
