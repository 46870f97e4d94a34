"""Attention of one token a row, on a CPU."""

import pytest
import torch
from torch.nn import Module

from rlhfless_functions.generation.engines.attention import grouped_attention

SIZE = 64


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head size]"""
    return grouped_attention(Module(), query, key, value, mask, scaling=SIZE**-0.5)[0][:, 0]


@pytest.mark.parametrize("window", [32, 224, 448])
@pytest.mark.parametrize("heads", [4, 7, 8])
def test_a_heads_numbers_do_not_depend_on_how_many_share_its_keys(heads: int, window: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, heads, 1, SIZE)
    key, value = torch.randn(2, 2, 1, window, SIZE)
    mask = torch.zeros(2, 1, 1, window).masked_fill(torch.arange(window) >= window - 20, float("-inf"))
    together = attended(query, key, value, mask)
    for first in range(0, heads, 3):
        few = slice(first, min(first + 3, heads))
        assert torch.equal(attended(query[:, few], key, value, mask), together[:, few])
    exact = attended(query.double(), key.double(), value.double(), mask.double())
    torch.testing.assert_close(together.double(), exact, rtol=0, atol=1e-5)
