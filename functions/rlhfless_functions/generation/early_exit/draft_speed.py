"""The speed of drafts from a layer's read-out: the passes that they save are counted, and the time that they take is
measured.

A cycle drafts up to d tokens, each by a pass of the layers up to the exit. One pass of the whole model verifies them,
and draws one token more than were right. The layers up to the exit do not depend on those after it, so the read-outs of
a pass over a known response are the drafts that decoding would have made. Its cycles can therefore be counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhfless_functions.api.probe import ExitDrafts
from rlhfless_functions.generation.early_exit.readouts import Readouts

DRAFTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
"""Draft lengths to try. On a CPU a pass has sixteen rows anyway."""
Choice = Literal["drawn", "likeliest"]


@dataclass(frozen=True)
class Cycles:
    """The decoding of responses in cycles."""

    count: int
    """Verifying passes."""
    drafted: int
    """Drafted tokens, right or wrong."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of the parts of a cycle on this machine, one sequence at a time."""

    drafts: Mapping[int, float]
    """Seconds of a drafted token, for some of the layers at which it may leave."""
    passes: Mapping[int, float]
    """Seconds of a pass of the whole model, for some numbers of rows. One row is plain decoding."""

    def draft(self, layer: int) -> float:
        """Return the seconds of a drafted token; interpolate between the measured layers."""
        return _between(self.drafts, layer)

    def verify(self, rows: int) -> float:
        """Return the seconds of a pass with so many rows."""
        return _between(self.passes, rows)


def count_cycles(right: np.ndarray, lengths: Sequence[int], drafts: int, longest: int) -> Cycles:
    """Count the cycles that decode responses.

    Args:
        right: [tokens] bool, all responses in a row: whether a draft at this place would equal the token.
        lengths: tokens of each response.
        drafts: most tokens that a cycle drafts.
        longest: number of response tokens beyond which nothing is drafted.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # The first wrong draft at or after each token.
    places = np.where(right, len(right), np.arange(len(right)))
    wrong = np.minimum.accumulate(places[::-1])[::-1] if len(right) else places
    at, count, drafted = starts.copy(), 0, 0
    while (going := at < ends).any():
        at, starts, ends = at[going], starts[going], ends[going]
        tried = np.minimum(drafts, longest - (at - starts) - 1)
        count += len(at)
        drafted += int(tried.sum())
        at = at + np.minimum(wrong[at] - at, tried) + 1
    return Cycles(count, drafted)


def best_drafts(readouts: Readouts, times: PassTimes, longest: int) -> list[ExitDrafts]:
    """Return the fastest way of drafting at each layer but the last, by counted cycles and measured times.

    Args:
        readouts: read-outs of the responses.
        times: measured times of this machine.
        longest: most tokens of a response.
    """
    tokens = sum(readouts.lengths)
    plain = times.verify(1)
    found = []
    for layer in range(1, len(readouts.drawn)):
        options = []
        ways: tuple[tuple[Choice, np.ndarray], ...] = (("drawn", readouts.drawn), ("likeliest", readouts.likeliest))
        for choice, right in ways:
            for drafts in DRAFTS:
                cycles = count_cycles(right[layer - 1], readouts.lengths, drafts, longest)
                seconds = cycles.drafted * times.draft(layer) + cycles.count * times.verify(drafts + 1)
                options.append(
                    ExitDrafts(
                        layer=layer,
                        drafts=drafts,
                        choice=choice,
                        tokens_per_pass=tokens / cycles.count,
                        draft_cost=times.draft(layer) / plain,
                        speed=tokens * plain / seconds,
                    )
                )
        found.append(max(options, key=lambda option: option.speed))
    return found


def _between(seconds: Mapping[int, float], at: int) -> float:
    known = sorted(seconds)
    return float(np.interp(at, known, [seconds[each] for each in known]))
