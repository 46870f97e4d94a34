"""Random numbers that depend only on the sample and the position of the token.

Each sample has a 64-bit key, a hash of (seed, purpose, step, prompt, index). The number for response token t is output
t of the SplitMix64 generator (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
seeded with that key. SplitMix64 is counter-based: output t is a mix of key + (t + 1)·γ. So a response can continue on
another actor without running a generator up to its place, and a whole batch of rows is one vectorised expression.
"""

import torch


def _signed(value: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def signed_keys(seeds: list[int]) -> list[int]:
    """Return 64-bit keys as int64 holds them."""
    return [_signed(seed % (1 << 64)) for seed in seeds]


def shifted_key(seed: int, positions: int) -> int:
    """Return the key whose output number `positions` + t equals output t of `seed`. It is for engines that count
    positions from the prompt's first token, and not from the response's."""
    return _signed((seed - positions * _GAMMA) % (1 << 64))


def bits(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return output number `positions` of SplitMix64 seeded with `keys`.

    Args:
        keys: [n] int64, the keys' bits.
        positions: [n] int64, from 0.

    Returns:
        [n] int64 whose bits are the 64-bit outputs.
    """
    state = keys + (positions + 1) * _GAMMA
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return [n] float64 in [0, 1 − 2⁻⁵²], one for each key and position."""
    return _shift_right(bits(keys, positions), 12).double() * 2.0**-52


def _shift_right(value: torch.Tensor, count: int) -> torch.Tensor:
    """Shift logically; torch's own shift is arithmetic."""
    return (value >> count) & ((1 << (64 - count)) - 1)
