"""The random numbers of a sample depend on the sample and the position alone, and are good ones."""

import torch

from rlhfless_functions.generation.engines.randomness import bits, signed_keys, uniforms
from rlhfless_functions.generation.engines.seeds import sample_seed

MASK = (1 << 64) - 1


def splitmix64(seed: int, count: int) -> list[int]:
    """The published algorithm, one number after the other."""
    outputs = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def at(seeds: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(signed_keys(seeds)), torch.tensor(positions)


def test_outputs_are_those_of_splitmix64() -> None:
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # The well-known test vector.
    for seed in (0, 1, 1234567, MASK, 1 << 63):
        produced = bits(*at([seed] * 50, list(range(50)))).tolist()
        assert [output & MASK for output in produced] == splitmix64(seed, 50)


def test_any_position_can_be_asked_for_alone() -> None:
    keys, positions = at([5, 5, 9], [0, 77, 77])
    together = uniforms(keys, positions)
    for row in range(3):
        assert uniforms(keys[row : row + 1], positions[row : row + 1]) == together[row]
    assert len(set(together.tolist())) == 3


def test_seeds_differ_in_every_coordinate() -> None:
    seeds = {
        sample_seed(seed, purpose, step, prompt, index)
        for seed in (0, 1, -1)
        for purpose in ("training", "evaluation")
        for step in (0, 1, 11)
        for prompt in (0, 1, 11)
        for index in (0, 1, 11)
    }
    assert len(seeds) == 3 * 2 * 3**3
    assert all(0 <= seed <= MASK for seed in seeds)


def test_numbers_are_uniform_within_a_sample_and_across_samples() -> None:
    within = uniforms(*at([sample_seed(0, "training", 1, 0, 0)] * 4096, list(range(4096))))
    across = uniforms(*at([sample_seed(0, "training", 1, prompt, 0) for prompt in range(4096)], [0] * 4096))
    for numbers in (within, across):
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = torch.histc(numbers, bins=64, min=0, max=1)
        chi_square = ((counts - 64) ** 2 / 64).sum()
        assert chi_square < 103  # 99.9% of chi-square with 63 degrees of freedom.
    correlation = torch.corrcoef(torch.stack([within, across]))[0, 1]
    assert abs(correlation) < 0.06
