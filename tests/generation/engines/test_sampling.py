"""Tokens come out as often as their probability says, with the log-probability that the trainer will compute."""

import pytest
import torch

from rlhfless_functions.generation.engines.sampling import draw

torch.set_num_threads(1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -30.0])
    evenly = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    tokens, _, sound = draw(logits.expand(20000, 5), temperature, evenly)
    expected = torch.softmax(logits.double() / temperature, -1)
    frequencies = torch.bincount(tokens, minlength=5) / 20000
    assert torch.allclose(frequencies.double(), expected, atol=1e-4)
    assert sound.all()


def test_log_probs_of_a_bfloat16_model_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(64, 1000) * 8).bfloat16()
    tokens, log_probs, _ = draw(logits, 0.7, torch.rand(64, dtype=torch.float64))
    expected = torch.log_softmax(logits.double() / 0.7, -1).gather(1, tokens[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    assert torch.allclose(log_probs.double(), expected, atol=2e-5)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-52])
def test_tokens_without_probability_are_never_drawn(uniform: float) -> None:
    impossible = float("-inf")
    logits = torch.tensor([[impossible, 0.0, impossible, 0.0, impossible], [impossible] * 4 + [3.0]])
    tokens, log_probs, sound = draw(logits, 1.0, torch.tensor([uniform, uniform], dtype=torch.float64))
    assert tokens.tolist() == [1 if uniform == 0 else 3, 4]
    assert torch.isfinite(log_probs).all()
    assert sound.all()


def test_the_tail_of_a_large_vocabulary_can_be_drawn() -> None:
    logits = torch.zeros(1, 200_000)
    tokens, *_ = draw(logits, 1.0, torch.tensor([1 - 2**-52], dtype=torch.float64))
    assert tokens.item() == 199_999


@pytest.mark.parametrize("row", [[float("nan"), 0.0], [float("inf"), 0.0], [float("-inf")] * 2])
def test_what_is_no_distribution_is_told_from_what_is(row: list[float]) -> None:
    tokens, _, sound = draw(torch.tensor([row, [0.0, 0.0]]), 1.0, torch.tensor([0.5, 0.4], dtype=torch.float64))
    assert sound.tolist() == [False, True]
    assert tokens.min() >= 0 and tokens.max() < 2
