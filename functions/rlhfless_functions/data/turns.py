"""The turns of a traced response, without pyarrow.

A trace has the sums of an episode, and they are divided evenly: the sampled tokens among the turns, the given ones
among the answers, and the time among the beginning and all turns.
"""

from typing import NamedTuple


class TracedResponse(NamedTuple):
    """A response of a trace."""

    sampled: int
    """Tokens that the policy sampled."""
    turns: int = 1
    given: int = 0
    """Tokens that its environment gave."""
    away_seconds: float = 0.0
    """Seconds for which it waited for its environment."""


def turns_of(response: TracedResponse) -> list[tuple[int, int]]:
    """Return the spans [start, end) of a response that the policy samples, a turn each.

    Given tokens lie between them. A response of one turn begins with them.
    """
    turns = max(1, min(response.turns, response.sampled))
    sampled = _parts(response.sampled, turns)
    given = [response.given if turns == 1 else 0, *_parts(response.given, turns - 1)]
    spans, place = [], 0
    for before, tokens in zip(given, sampled, strict=True):
        spans.append((place + before, place + before + tokens))
        place = spans[-1][1]
    return spans


def wait_of(response: TracedResponse) -> float:
    """Return the seconds for which a response waits before its first turn, and after each."""
    return response.away_seconds / (len(turns_of(response)) + 1)


def _parts(whole: int, count: int) -> list[int]:
    """Return a whole in so many nearly equal parts."""
    return [whole * (part + 1) // count - whole * part // count for part in range(count)]
