"""A model's suitability for early exit, from its read-outs: pure functions of arrays. Layers count from 1 here."""

import numpy as np

from rlhfless_functions.api.probe import SkippedLayers
from rlhfless_functions.generation.early_exit.readouts import Readouts

THRESHOLDS = np.linspace(0.0, 1.0, 201)


def settled(drawn: np.ndarray) -> np.ndarray:
    """Return whether a token's draw is right at this layer and at all later ones. It is from its saturation on.

    Args:
        drawn: [layers, tokens] bool.
    """
    return np.logical_and.accumulate(drawn[::-1], axis=0)[::-1]


def suitability(drawn: np.ndarray) -> float:
    """Return the mean share of layers behind the one where a token's draw is settled, in [0, 1).

    An oracle would skip this share, because it knows when each token's read-outs stop changing: the saturation event of
    Geva et al. (arXiv 2203.14680), and the oracle of CALM (arXiv 2207.07061).

    Args:
        drawn: [layers, tokens] bool.
    """
    layers = len(drawn)
    return float(settled(drawn)[:-1].mean(axis=1).sum() / layers) if layers > 1 else 0.0


def skippable(readouts: Readouts, agreement: float) -> SkippedLayers:
    """Return the layers that could be skipped: by one layer for all tokens, and by each token's own confidence (CALM's
    softmax response, arXiv 2207.07061).

    Args:
        readouts: read-outs of the tokens.
        agreement: least share of tokens that stay the same.
    """
    layers, tokens = readouts.drawn.shape
    enough = readouts.drawn.mean(axis=1) >= agreement
    enough[-1] = True
    layer = int(np.logical_and.accumulate(enough[::-1])[::-1].argmax()) + 1
    # Every token leaves after the last layer at the latest, and then equals the whole model's.
    right = np.vstack([readouts.drawn[:-1], np.ones((1, tokens), dtype=bool)])
    threshold, share = None, 0.0
    for each in THRESHOLDS:
        sure = np.vstack([readouts.confidence[:-1] >= each, np.ones((1, tokens), dtype=bool)])
        leaves = sure.argmax(axis=0)
        skipped = float((layers - 1 - leaves).mean() / layers)
        if right[leaves, np.arange(tokens)].mean() >= agreement and skipped > share:
            threshold, share = float(each), skipped
    return SkippedLayers(
        agreement=agreement,
        layer=layer,
        one_layer=(layers - layer) / layers,
        threshold=threshold,
        by_confidence=share,
    )
