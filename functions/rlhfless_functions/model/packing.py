"""The positions of samples in a row of tokens without padding, and the shared prompts before them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rlhfless_functions.model.prompt_keys import KeyPlaces, gather_keys
from rlhfless_functions.model.varlen_kernels import Sequences


@dataclass(frozen=True)
class PromptStates:
    """Keys and values of prompts in one row."""

    lengths: list[int]
    """Number of tokens of each prompt."""
    states: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, [1, key-value heads, tokens of all prompts, head size]."""


@dataclass(frozen=True, eq=False)
class Packing:
    """The positions of samples in a row of tokens."""

    lengths: list[int]
    """Number of tokens of each sample, at least 1."""
    prompts: PromptStates | None = None
    """The prompts before the samples, if they are shared."""
    numbers: list[int] = field(default_factory=list)
    """Index of each sample's prompt."""
    record: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    """Takes the keys and values of each layer, if set."""
    _sequences: dict[torch.device, Sequences] = field(default_factory=dict)
    _places: dict[torch.device, KeyPlaces] = field(default_factory=dict)

    @property
    def starts(self) -> torch.Tensor:
        """[samples] position in the row at which each sample begins."""
        return _bounds(self.lengths)[:-1].long()

    @property
    def key_lengths(self) -> list[int]:
        """Number of keys that each sample's last token sees."""
        if self.prompts is None:
            return self.lengths
        return [self.prompts.lengths[number] + own for number, own in zip(self.numbers, self.lengths, strict=True)]

    def sequences(self, device: torch.device) -> Sequences:
        """Return the samples' boundaries, as a kernel takes them."""
        if device not in self._sequences:
            bounds = _bounds(self.lengths).to(device)
            key_bounds = bounds if self.prompts is None else _bounds(self.key_lengths).to(device)
            self._sequences[device] = Sequences(bounds, key_bounds, max(self.lengths), max(self.key_lengths))
        return self._sequences[device]

    def keys(self, layer: int, own: torch.Tensor, which: int) -> list[torch.Tensor]:
        """Return each sample's keys (0) or values (1) in a layer, [1, key-value heads, tokens, head size]."""
        pieces = list(own.split(self.lengths, dim=2))
        if self.prompts is None:
            return pieces
        before = self.prompts.states[layer][which].split(self.prompts.lengths, dim=2)
        return [torch.cat([before[number], piece], dim=2) for number, piece in zip(self.numbers, pieces, strict=True)]

    def key_row(self, layer: int, own: torch.Tensor, which: int) -> torch.Tensor:
        """Return the keys (0) or values (1) of all samples in a layer in one row, [keys, key-value heads, head size].

        Args:
            own: those of the samples' own tokens, [1, key-value heads, tokens, head size].
        """
        if self.prompts is None:
            return own[0].transpose(0, 1)
        if own.device not in self._places:
            self._places[own.device] = KeyPlaces.of(self.prompts.lengths, self.numbers, self.lengths, own.device)
        before = self.prompts.states[layer][which]
        return gather_keys(before[0].transpose(0, 1), own[0].transpose(0, 1), self._places[own.device])


def _bounds(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def positions(lengths: Sequence[int], first: Sequence[int] | None = None) -> torch.Tensor:
    """Return the position of each token in its sample, [1, sum of lengths].

    Args:
        lengths: number of tokens of each sample.
        first: position of each sample's first token; by default 0.
    """
    starts = [0] * len(lengths) if first is None else first
    return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])[None]
