"""Divides samples into forward passes: of whole samples, or of prompts once and responses in micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.model.forward import (
    PASS_OVERHEAD_TOKENS,
    RaggedBatch,
    collate,
    collate_responses,
    cost_of,
    micro_batches,
    packed_batches,
)
from rlhfless_functions.model.shared_prompts import ResponseBatch

KEYS_PER_TOKEN = 8
"""Copying the keys and values of this many prompt tokens to a response costs about as much as computing one token."""


@dataclass(frozen=True)
class Block:
    """Micro-batches that share their prompts' pass."""

    prompts: list[int]
    """One sample of each prompt that is computed once, before the runs; empty if samples are passed whole."""
    runs: list[list[int]]
    """Samples of each micro-batch."""


WHOLE = Block([], [])
"""For samples that are passed whole."""


def plan_micro_batches(
    samples: Sequence[GeneratedSample], chosen: Sequence[int], budget_tokens: int, *, share: bool, packed: bool = False
) -> list[Block]:
    """Divide samples into blocks that compute the fewest tokens. The result depends only on the arguments.

    Samples of a group share their prompt's pass if that costs less than passing them whole. The costs include padding
    and the additional pass.

    Args:
        samples: all samples.
        chosen: indices into `samples`.
        budget_tokens: most tokens of a pass, padding included; a longer sample is passed alone. A block's prompts may
            take half of it, because their activations are kept while the responses pass.
        share: whether the model can share prompts.
        packed: whether passes are packed rows, which have no padding.
    """
    chosen = sorted(chosen)
    lengths = [len(samples[row].prompt_tokens) + len(samples[row].response_tokens) for row in chosen]
    whole = _cut(lengths, budget_tokens, packed)
    plain = [Block([], [[chosen[place] for place in run] for run in whole])] if whole else []
    if not share or not plain:
        return plain
    blocks, cost = _shared(samples, chosen, budget_tokens, packed)
    return blocks if cost < cost_of(whole, lengths, packed=packed) else plain


def prompt_numbers(samples: Sequence[GeneratedSample], block: Block, run: Sequence[int]) -> list[int]:
    """Return the index of each sample's prompt among its block's prompts, for the samples of a run."""
    numbers = {tuple(samples[row].prompt_tokens): number for number, row in enumerate(block.prompts)}
    return [numbers[tuple(samples[row].prompt_tokens)] for row in run]


def collate_run(
    samples: Sequence[GeneratedSample], block: Block, run: Sequence[int], pad_id: int, *, packed: bool
) -> RaggedBatch | ResponseBatch:
    """Return the tokens of one of a block's runs: those of the responses alone if the block has their prompts. Given
    tokens are read, and get no number."""
    responses = [samples[row].response_tokens for row in run]
    batch: RaggedBatch | ResponseBatch
    if block.prompts:
        batch = collate_responses(prompt_numbers(samples, block, run), responses, pad_id, packed=packed)
    else:
        batch = collate([samples[row].prompt_tokens for row in run], responses, pad_id, packed=packed)
    if not any(samples[row].given for row in run):
        return batch
    sampled = batch.response_mask.clone()
    for place, row in enumerate(run):
        for start, end in samples[row].given:
            sampled[place, start:end] = False
    return batch.only(sampled)


def _cut(lengths: Sequence[int], budget_tokens: int, packed: bool) -> list[list[int]]:
    return packed_batches(lengths, budget_tokens) if packed else micro_batches(lengths, budget_tokens)


def _shared(
    samples: Sequence[GeneratedSample], chosen: Sequence[int], budget_tokens: int, packed: bool
) -> tuple[list[Block], int]:
    members: dict[tuple[int, ...], list[int]] = {}
    for row in chosen:
        members.setdefault(tuple(samples[row].prompt_tokens), []).append(row)
    groups = sorted(members.values(), key=lambda rows: (len(samples[rows[0]].prompt_tokens), rows[0]))

    def size(block: Sequence[Sequence[int]]) -> int:
        """Return the number of tokens of a block's prompts; the last prompt is the longest."""
        widths = [len(samples[group[0]].prompt_tokens) for group in block]
        return sum(widths) if packed else len(widths) * widths[-1]

    blocks: list[list[list[int]]] = []
    for group in groups:
        if blocks and size([*blocks[-1], group]) <= budget_tokens // 2:
            blocks[-1].append(group)
        else:
            blocks.append([group])
    # The widest first: then memory peaks at the start.
    planned, cost = [], 0
    for block in reversed(blocks):
        rows = sorted(row for group in block for row in group)
        widest = len(samples[block[-1][0]].prompt_tokens)
        prompts = [len(samples[row].prompt_tokens) if packed else widest for row in rows]
        lengths = [
            len(samples[row].response_tokens) + prompt // KEYS_PER_TOKEN
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        runs = _cut(lengths, max(1, budget_tokens - size(block)), packed)
        cost += size(block) + PASS_OVERHEAD_TOKENS + cost_of(runs, lengths, packed=packed)
        planned.append(Block([group[0] for group in block], [[rows[place] for place in run] for run in runs]))
    return planned, cost
