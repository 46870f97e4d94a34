"""Which kernel attends to packed rows, and that it is called with what it expects."""

import inspect
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from rlhfless_functions.model.varlen_kernels import Kernel, Sequences, attend, choose_kernel, installed_kernels
from tests.model import varlen_stand_ins

BOTH: frozenset[Kernel] = frozenset({"torch", "flash_attn"})
HOPPER = (9, 0)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_sizes", "installed", "chosen"),
    [
        (HOPPER, torch.bfloat16, (128, 128), BOTH, "torch"),
        (HOPPER, torch.bfloat16, (128, 128), {"flash_attn"}, "flash_attn"),
        (HOPPER, torch.bfloat16, (128, 128), set(), "sdpa"),
        ((8, 0), torch.bfloat16, (256, 256), {"torch"}, "torch"),
        ((7, 5), torch.bfloat16, (128, 128), BOTH, "sdpa"),
        (None, torch.bfloat16, (128, 128), BOTH, "sdpa"),
        (HOPPER, torch.float32, (128, 128), BOTH, "sdpa"),
        (HOPPER, torch.bfloat16, (288, 288), BOTH, "sdpa"),
        (HOPPER, torch.bfloat16, (100, 100), BOTH, "sdpa"),
        (HOPPER, torch.bfloat16, (192, 128), BOTH, "sdpa"),
    ],
    ids=[
        "torch's comes first",
        "flash-attn where torch has none",
        "nothing is installed",
        "an Ampere GPU with wide heads",
        "a GPU before Ampere",
        "a CPU",
        "float32",
        "heads too wide",
        "heads no multiple of eight",
        "values narrower than keys",
    ],
)
def test_a_flash_kernel_is_chosen_where_it_can_compute(
    capability: Any, dtype: torch.dtype, head_sizes: Any, installed: Any, chosen: str
) -> None:
    assert choose_kernel(capability, dtype, head_sizes, frozenset(installed)) == chosen


def test_the_stand_in_has_the_signature_of_torch_s_kernel() -> None:
    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]

    assert parameters(varlen_stand_ins.varlen_attn) == parameters(varlen.varlen_attn)


def test_a_form_of_torch_s_kernel_without_windows_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_10(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> None:
        raise AssertionError

    installed_kernels.cache_clear()
    assert "torch" in installed_kernels()
    monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_10)
    installed_kernels.cache_clear()
    assert "torch" not in installed_kernels()
    installed_kernels.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("kernel", ["torch", "older torch", "flash_attn"])
def test_each_sequence_attends_to_itself_with_its_last_query_at_its_last_key(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, heads: int, window: int | None
) -> None:
    varlen_stand_ins.install(monkeypatch, kernel)
    lengths, key_lengths = [4, 1, 3], [4, 5, 6]
    torch.manual_seed(0)
    query, key, value = torch.randn(8, heads, 8), torch.randn(15, 2, 8), torch.randn(15, 2, 8)
    bounds, key_bounds = (
        torch.tensor([0, *each], dtype=torch.int32).cumsum(0, dtype=torch.int32) for each in (lengths, key_lengths)
    )
    sequences = Sequences(bounds, key_bounds, 4, 6)
    together = attend(kernel.removeprefix("older "), query, key, value, sequences, 0.7, window)
    for number, (own, keys) in enumerate(zip(lengths, key_lengths, strict=True)):
        rows, columns = slice(bounds[number], bounds[number + 1]), slice(key_bounds[number], key_bounds[number + 1])
        distance = torch.arange(keys - own, keys)[:, None] - torch.arange(keys)
        alone = scaled_dot_product_attention(
            *(each.transpose(0, 1)[None] for each in (query[rows], key[columns], value[columns])),
            attn_mask=(distance >= 0) & (distance < (window or keys)),
            scale=0.7,
            enable_gqa=True,
        )
        torch.testing.assert_close(together[rows], alone[0].transpose(0, 1))
