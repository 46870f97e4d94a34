"""Prediction of how samples act: for how long they are with their environments, and how many tokens they are given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

_WEIGHT = 0.5
"""Share of the newest visit in a prompt's average."""


@dataclass(frozen=True, slots=True)
class Acting:
    """The part of a sample that is not decoded."""

    away_seconds: float = 0.0
    """Seconds that it is with its environment."""
    given_tokens: float = 0.0
    """Tokens that its environment gives."""

    def times(self, factor: float) -> "Acting":
        """Return so much of it."""
        return Acting(self.away_seconds * factor, self.given_tokens * factor)


NO_ACTING = Acting()
"""A sample without an environment."""


class ActingPredictor:
    """Per-prompt moving averages of how samples act.

    Args:
        by_token: returns how all samples act for each token that they sample.
    """

    def __init__(self, by_token: Callable[[], Acting]) -> None:
        self._by_token = by_token
        self._prompts: dict[int, Acting] = {}

    def observe(self, acted: Mapping[tuple[int, int], Acting]) -> None:
        """Learn from the samples of a rollout, by (prompt, index)."""
        for prompt, keys in groupby(sorted(acted), key=lambda key: key[0]):
            group = [acted[key] for key in keys]
            away, given = fmean(each.away_seconds for each in group), fmean(each.given_tokens for each in group)
            if (known := self._prompts.get(prompt)) is not None:
                away = known.away_seconds + _WEIGHT * (away - known.away_seconds)
                given = known.given_tokens + _WEIGHT * (given - known.given_tokens)
            self._prompts[prompt] = Acting(away, given)

    def predict(self, prompt: int, tokens: float, *, known: bool = True) -> Acting:
        """Return how a sample acts on average.

        Args:
            tokens: mean number of tokens that a sample of the prompt samples.
            known: whether it is a training prompt. For others only the mean over all prompts is known.
        """
        if known and (found := self._prompts.get(prompt)) is not None:
            return found
        by_token = self._by_token()
        return NO_ACTING if by_token == NO_ACTING else by_token.times(tokens)

    def state(self) -> list[list[float]]:
        """Return everything that `restore` needs, as JSON values."""
        return [[prompt, each.away_seconds, each.given_tokens] for prompt, each in sorted(self._prompts.items())]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Restore a `state`."""
        self._prompts = {int(prompt): Acting(float(away), float(given)) for prompt, away, given in state}
