"""The keys of a row's samples, each sample's prompt before its own tokens, from prompts that are in memory once.

One gather serves all samples: a piece for each of them would be thousands of small kernels in a pass. A prompt's
gradient sums those of its samples in a fixed order, and so it is the same in every run.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch


@dataclass(frozen=True)
class KeyPlaces:
    """The source of each key of a row, and the place of its gradient, on the row's device."""

    sources: torch.Tensor
    """[keys] place of each key among the prompts' tokens and the samples' own ones after them."""
    own: torch.Tensor
    """[own tokens] place of each own token in the row of keys."""
    rounds: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Places in the row of keys, and their tokens in the prompts: a round has at most one sample of each prompt."""

    @classmethod
    def of(
        cls, prompt_lengths: Sequence[int], numbers: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> "KeyPlaces":
        """Lay out a row.

        Args:
            prompt_lengths: tokens of each prompt.
            numbers: index of each sample's prompt.
            lengths: own tokens of each sample.
            device: of the keys.
        """
        prompt_starts = list(accumulate(prompt_lengths, initial=0))
        sources: list[int] = []
        own: list[int] = []
        rounds: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        seen: defaultdict[int, int] = defaultdict(int)
        for number, start, length in zip(
            numbers, accumulate(lengths, initial=prompt_starts[-1]), lengths, strict=False
        ):
            before = range(prompt_starts[number], prompt_starts[number + 1])
            places, tokens = rounds[seen[number]]
            places.extend(range(len(sources), len(sources) + len(before)))
            tokens.extend(before)
            seen[number] += 1
            sources.extend(before)
            own.extend(range(len(sources), len(sources) + length))
            sources.extend(range(start, start + length))

        def indices(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        made = [(indices(places), indices(tokens)) for places, tokens in rounds.values()]
        return cls(indices(sources), indices(own), made)


def gather_keys(prompts: torch.Tensor, own: torch.Tensor, places: KeyPlaces) -> torch.Tensor:
    """Return the row of keys, [keys, heads, head size], with autograd.

    Args:
        prompts: [tokens of all prompts, heads, head size].
        own: [own tokens of all samples, heads, head size].
        places: of the row.
    """
    row: torch.Tensor = _Gather.apply(prompts, own, places)
    return row


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prompts: torch.Tensor, own: torch.Tensor, places: KeyPlaces) -> torch.Tensor:
        ctx.places, ctx.prompt_tokens = places, len(prompts)
        return torch.cat([prompts, own]).index_select(0, places.sources)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (gradient,) = gradients
        to_prompts = to_own = None
        if ctx.needs_input_grad[0]:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            total = gradient.new_zeros((ctx.prompt_tokens, *gradient.shape[1:]), dtype=wide)
            for places, tokens in ctx.places.rounds:
                # No token is there twice, so the sum does not depend on the order of the device's threads.
                total.index_add_(0, tokens, gradient.index_select(0, places).to(wide))
            to_prompts = total.to(gradient.dtype)
        if ctx.needs_input_grad[1]:
            to_own = gradient.index_select(0, ctx.places.own)
        return to_prompts, to_own, None
