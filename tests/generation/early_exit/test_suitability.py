"""From read-outs to the numbers of a model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from rlhfless_functions.generation.early_exit.readouts import Readouts
from rlhfless_functions.generation.early_exit.suitability import settled, skippable, suitability

DRAWN = arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=8))


def readouts(drawn: np.ndarray, confidence: np.ndarray | None = None) -> Readouts:
    drawn = drawn.copy()
    drawn[-1] = True
    certain = np.ones(drawn.shape, np.float32)
    return Readouts(drawn, drawn, drawn, certain, certain if confidence is None else confidence, [drawn.shape[1]])


def test_a_token_is_settled_once_no_later_layer_draws_another() -> None:
    drawn = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=bool)
    assert settled(drawn).tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    # Settled after layers 1, 3 and 4 of 4.
    assert suitability(drawn) == pytest.approx((3 / 4 + 1 / 4 + 0) / 3)


@given(DRAWN)
def test_suitability_is_the_mean_share_of_layers_behind(drawn: np.ndarray) -> None:
    drawn = readouts(drawn).drawn
    layers, tokens = drawn.shape
    shares = []
    for token in range(tokens):
        wrong = [layer for layer in range(layers) if not drawn[layer, token]]
        shares.append((layers - 1 - (wrong[-1] + 1 if wrong else 0)) / layers)
    assert suitability(drawn) == pytest.approx(np.mean(shares))
    assert 0 <= suitability(drawn) < 1


def test_one_layer_can_be_left_at_where_all_behind_it_agree_often_enough() -> None:
    drawn = np.zeros((4, 10), dtype=bool)
    drawn[0, :9] = drawn[2, :9] = True
    drawn[1, :8] = True
    at_90, at_80 = skippable(readouts(drawn), 0.9), skippable(readouts(drawn), 0.8)
    assert (at_90.layer, at_90.one_layer) == (3, 0.25)
    assert (at_80.layer, at_80.one_layer) == (1, 0.75)
    nothing = skippable(readouts(drawn), 1.0)
    assert (nothing.layer, nothing.one_layer) == (4, 0.0)


def test_tokens_leave_where_they_are_sure() -> None:
    drawn = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=bool)
    confidence = np.array([[0.9, 0.8, 0.3, 0.5], [1, 1, 1, 1]], dtype=np.float32)
    found = skippable(readouts(drawn, confidence), 1.0)
    assert found.threshold is not None
    assert 0.5 < found.threshold <= 0.8
    assert found.by_confidence == pytest.approx(2 / 4 / 2)
    assert skippable(readouts(drawn, confidence), 0.75).by_confidence == 0.5


def test_a_wrong_read_out_that_is_sure_lets_nothing_leave() -> None:
    drawn = np.array([[0, 1], [1, 1]], dtype=bool)
    confidence = np.array([[1.0, 0.2], [1, 1]], dtype=np.float32)
    found = skippable(readouts(drawn, confidence), 0.9)
    assert (found.threshold, found.by_confidence) == (None, 0.0)


@given(DRAWN, st.floats(0.05, 1), st.integers(0, 2**32 - 1))
def test_what_is_skipped_leaves_as_many_draws_as_asked_for(drawn: np.ndarray, agreement: float, seed: int) -> None:
    confidence = np.random.default_rng(seed).random(drawn.shape, dtype=np.float32)
    read = readouts(drawn, confidence)
    layers, tokens = drawn.shape
    found = skippable(read, agreement)
    assert all(read.drawn[layer].mean() >= agreement for layer in range(found.layer - 1, layers))
    assert found.layer == 1 or read.drawn[found.layer - 2].mean() < agreement
    if found.threshold is not None:
        exits = [
            next((layer for layer in range(layers - 1) if confidence[layer, token] >= found.threshold), layers - 1)
            for token in range(tokens)
        ]
        assert np.mean([read.drawn[layer, token] for token, layer in enumerate(exits)]) >= agreement
        assert found.by_confidence == pytest.approx(np.mean([(layers - 1 - layer) / layers for layer in exits]))


def test_a_model_of_one_layer_can_skip_nothing() -> None:
    read = readouts(np.ones((1, 3), dtype=bool))
    assert suitability(read.drawn) == 0
    found = skippable(read, 0.5)
    assert (found.layer, found.one_layer, found.by_confidence) == (1, 0.0, 0.0)
