"""Keys and values of a continuous batch, in fixed slots that are written in place."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

BLOCK_TOKENS = 32
"""Attention reads a multiple of this many tokens. Masked tokens add exact zeros. On a CPU the kernels' order of
summation then does not depend on the length of the batch's other rows."""


def padded(tokens: int, block: int = BLOCK_TOKENS) -> int:
    """Round up to whole blocks."""
    return -(-tokens // block) * block


class SlotCache(Cache):
    """A transformers cache of [slots, heads, capacity, head size] a layer, allocated at a layer's first write.

    Before each forward pass the caller says where its tokens go (`decode`, `verify` or `replay`). Positions and masks
    are explicit, so the cache has no length of its own. Rows are right-padded; numbers beyond a row's length are masked
    but finite.

    Args:
        slots: sequences held.
        capacity: tokens of a sequence, a multiple of `BLOCK_TOKENS`.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.capacity = capacity
        self._stores: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._slots = torch.empty(0, dtype=torch.long)
        self._positions = self._slots
        self._addresses: dict[int, torch.Tensor] = {}
        self._shared_slot: int | None = None
        self._in_order = True
        self._window = 0

    @property
    def bytes(self) -> int:
        """Bytes of the memory that it holds."""
        return sum(store.numel() * store.element_size() for layer in self._stores for store in layer)

    def decode(self, positions: torch.Tensor, window: int) -> None:
        """Let the next pass feed one token to each of the first slots.

        Args:
            positions: [rows] position of each row's token.
            window: tokens that attention reads, a multiple of `BLOCK_TOKENS` above every position.
        """
        slots = torch.arange(len(positions), device=positions.device)
        self._aim(slots, positions, window, shared_slot=None)

    def verify(self, slots: torch.Tensor, positions: torch.Tensor, window: int) -> None:
        """Let the next pass feed tokens of any slots, each token as a row of its own. A slot may have several.
        Attention gets the keys and values of all slots, in their order, and finds a row's slot in `RowsBySlot`.

        Args:
            slots: [rows] slot of each row's token.
            positions: [rows] position of the token.
            window: as for `decode`.
        """
        self._aim(slots, positions, window, shared_slot=None)
        self._in_order = False

    def replay(self, slot: int, positions: torch.Tensor, window: int) -> None:
        """Let the next pass feed many tokens of one slot, each as a row of its own that reads the same keys and
        values."""
        self._aim(torch.full_like(positions, slot), positions, window, shared_slot=slot)

    def _aim(self, slots: torch.Tensor, positions: torch.Tensor, window: int, shared_slot: int | None) -> None:
        self._slots, self._positions, self._window = slots, positions, window
        self._shared_slot, self._in_order = shared_slot, True
        self._addresses.clear()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token a row ([rows, heads, 1, head size]), and return the keys and values that attention reads."""
        keys, values = self._layer(layer_idx, key_states, value_states)
        addresses = self._address(key_states.shape[1])
        _rows(keys).index_copy_(0, addresses, key_states.reshape(-1, key_states.shape[-1]))
        _rows(values).index_copy_(0, addresses, value_states.reshape(-1, value_states.shape[-1]))
        rows = len(self._slots)
        if not self._in_order:
            return keys[:, :, : self._window], values[:, :, : self._window]
        if self._shared_slot is None:
            return keys[:rows, :, : self._window], values[:rows, :, : self._window]
        slot = slice(self._shared_slot, self._shared_slot + 1)
        return (
            keys[slot, :, : self._window].expand(rows, -1, -1, -1),
            values[slot, :, : self._window].expand(rows, -1, -1, -1),
        )

    def store(
        self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Copy row `rows[i]` of keys and values ([n, heads, tokens, head size] a layer) to the start of `slots[i]`."""
        for layer, (keys, values) in enumerate(layers):
            tokens = keys.shape[2]
            own_keys, own_values = self._layer(layer, keys, values)
            own_keys[:, :, :tokens].index_copy_(0, slots, keys.index_select(0, rows))
            own_values[:, :, :tokens].index_copy_(0, slots, values.index_select(0, rows))

    def copy(self, sources: torch.Tensor, slots: torch.Tensor, tokens: int) -> None:
        """Copy the first `tokens` tokens of `sources[i]` to `slots[i]`; all are read before any is written."""
        window = [(keys[:, :, :tokens], values[:, :, :tokens]) for keys, values in self._stores]
        self.store(window, sources, slots)

    def _layer(
        self, layer: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._stores) <= layer:
            # Zeros, not empty memory: a masked NaN is still a NaN after a multiplication with zero.
            keys, values = (
                states.new_zeros(self.slots, states.shape[1], self.capacity, states.shape[-1])
                for states in (key_states, value_states)
            )
            self._stores.append((keys, values))
        return self._stores[layer]

    def _address(self, heads: int) -> torch.Tensor:
        """Return [rows · heads] index of each written vector in the flat store. Layers with as many heads share it."""
        if heads not in self._addresses:
            head = torch.arange(heads, device=self._slots.device)
            row = (self._slots[:, None] * heads + head) * self.capacity + self._positions[:, None]
            self._addresses[heads] = row.reshape(-1)
        return self._addresses[heads]

    def erase(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Overwrite tokens with zeros. If they are NaN, a mask does not hide them."""
        for layer in self._stores:
            for store in layer:
                store[slots, :, positions] = 0

    def reset(self) -> None:
        """Release the memory. It may hold NaN, which a mask does not hide, so it is not used again."""
        self._stores.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not used, because positions are explicit."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return length and offset of the keys and values that attention reads."""
        return self._window, 0


def _rows(store: torch.Tensor) -> torch.Tensor:
    return store.view(-1, store.shape[-1])
