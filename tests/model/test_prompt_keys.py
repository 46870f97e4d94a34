"""The keys of samples whose prompts are in memory once: one gather gives what a piece for each sample gives."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions.model.packing import Packing, PromptStates

HEADS, SIZE = 2, 3


@given(st.randoms(use_true_random=False))
def test_a_row_of_keys_is_that_of_the_samples_pieces_with_the_same_gradients(numbers: random.Random) -> None:
    prompt_lengths = [numbers.randint(1, 5) for _ in range(numbers.randint(1, 4))]
    samples = [numbers.randrange(len(prompt_lengths)) for _ in range(numbers.randint(1, 9))]
    lengths = [numbers.randint(1, 6) for _ in samples]
    generator = torch.Generator().manual_seed(numbers.randrange(1000))

    def tensor(tokens: int) -> torch.Tensor:
        return torch.randn(1, HEADS, tokens, SIZE, generator=generator, dtype=torch.float64).requires_grad_()

    before, own = tensor(sum(prompt_lengths)), tensor(sum(lengths))
    packing = Packing(lengths, PromptStates(prompt_lengths, [(before, before)]), samples)
    row = packing.key_row(0, own, 0)
    pieces = torch.cat(packing.keys(0, own, 0), dim=2)[0].transpose(0, 1)
    assert torch.equal(row, pieces)
    weights = torch.randn(row.shape, generator=generator, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((each * weights).sum(), (before, own)) for each in (row, pieces))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_samples_without_shared_prompts_have_their_own_keys_alone() -> None:
    own = torch.randn(1, HEADS, 5, SIZE)
    assert torch.equal(Packing([2, 3]).key_row(0, own, 0), own[0].transpose(0, 1))


def test_prompts_that_need_no_gradient_get_none() -> None:
    before, own = torch.randn(1, HEADS, 2, SIZE), torch.randn(1, HEADS, 3, SIZE, requires_grad=True)
    packing = Packing([3], PromptStates([2], [(before, before)]), [0])
    packing.key_row(0, own, 1).sum().backward()
    assert own.grad is not None and before.grad is None
