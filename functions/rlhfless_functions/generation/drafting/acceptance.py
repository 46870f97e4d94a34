"""Probabilities that drafted tokens are right, learnt from the drafts that were tried."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhfless_functions.generation.drafting.index import Integers

LONGEST = 64
"""Longest match with a probability of its own. Longer matches count as this long."""
_PRIOR = np.select([np.arange(LONGEST + 1) < n for n in (1, 4, 6, 12)], [0.0, 0.3, 0.5, 0.7], default=0.85)
_PRIOR_TRIALS = 8.0
_FORGET = 0.999
"""Factor of the earlier passes' weight after each pass."""
_PROMPT_TRIALS = 4.0


@dataclass
class _Prompt:
    accepted: float = 0.0
    expected: float = 0.0


class Acceptance:
    """Probabilities by the length of the match, and each prompt's deviation from them. It outlives runs."""

    def __init__(self) -> None:
        self._accepted = _PRIOR * _PRIOR_TRIALS
        self._tried = np.full(LONGEST + 1, _PRIOR_TRIALS)
        self._prompts: dict[int, _Prompt] = {}

    def chances(self, lengths: Integers, tokens: int) -> NDArray[np.float64]:
        """Return the chance that all drafted tokens up to each are right, [sequences, tokens].

        Args:
            lengths: length of each sequence's match.
            tokens: number of tokens that could be drafted.
        """
        chance = self._accepted / self._tried
        position = np.minimum(lengths[:, None] + np.arange(tokens), LONGEST)
        return np.cumprod(chance[position], axis=1)

    def factor(self, prompt: int) -> float:
        """Return how much likelier drafts are to be right for this prompt than for others, within a small upper
        bound."""
        known = self._prompts.get(prompt)
        if known is None:
            return 1.0
        return min(1.1, (known.accepted + _PROMPT_TRIALS) / (known.expected + _PROMPT_TRIALS))

    def learn(self, lengths: Integers, tried: Integers, accepted: Integers) -> None:
        """Learn from a pass's drafts.

        Args:
            lengths: length of each sequence's match.
            tried: tokens drafted for each, at least one.
            accepted: number of them that were right.
        """
        self._accepted *= _FORGET
        self._tried *= _FORGET
        # Tokens behind the first wrong one say nothing.
        judged = np.minimum(accepted + 1, tried)
        for counts, total in ((accepted, self._accepted), (judged, self._tried)):
            firsts = np.repeat(lengths - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
            np.add.at(total, np.minimum(firsts + np.arange(len(firsts)), LONGEST), 1.0)

    def learn_prompt(self, prompt: int, accepted: int, expected: float) -> None:
        """Learn from a sequence's drafts, by its prompt."""
        known = self._prompts.setdefault(prompt, _Prompt())
        known.accepted = 0.9 * known.accepted + accepted
        known.expected = 0.9 * known.expected + expected

    def forget_prompts(self) -> None:
        """Forget the prompts, because those of another share follow."""
        self._prompts.clear()
