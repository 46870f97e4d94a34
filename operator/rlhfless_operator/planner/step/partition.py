"""Contiguous partitions of a sorted chain of work: the optimisation under the planner.

A chain holds items sorted by length, longest first. A share of the items i … j−1 on one instance takes
    start + repeat[i] + step · max(length[i], occupancy[i … j−1]) + work[i … j−1]   seconds
(docs/research/planner.md derives it). Within a time limit, the fewest shares and the least sum of their seconds both
come from filling each share as far as the limit allows, from the longest item on. So a plan is one number, the limit,
and the rest is a search over limits.
"""

import heapq
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FIRST_STEP = 0.01
"""Ratio above its lower bound at which the search for the least time begins."""


@dataclass(frozen=True)
class Cover:
    """One way to cut a chain."""

    starts: tuple[int, ...]
    """First item of each share."""
    seconds: tuple[float, ...]
    """Time of each share."""
    makespan: float
    """Time of the longest share, with a tail if any share may hold one."""
    total: float
    """Sum of all shares' times: instance-seconds."""


class Chain:
    """Items to be cut into shares.

    Args:
        length: [items] steps that the item's longest sequence takes, not increasing.
        work: [items] seconds that the item adds to its share besides the steps' constant.
        occupancy: [items] steps that the item would take alone times the part of an instance that it fills.
        repeat: [items] seconds to add where a share begins with this item.
        step_seconds: constant part of a step.
        start_seconds: seconds that every share is charged for its instance.
        tail: steps of an unforeseen response that any share may hold. A share's time is limited as if it held one, but
            it is not charged for it.
        filling: [items] part of an instance that the item fills while it runs, if all of a share must run at once.
    """

    def __init__(
        self,
        length: Floats,
        work: Floats,
        occupancy: Floats,
        repeat: Floats,
        *,
        step_seconds: float,
        start_seconds: float,
        tail: float = 0.0,
        filling: Floats | None = None,
    ) -> None:
        self.count = len(length)
        self.step = step_seconds
        self.start = start_seconds
        busy, occupied = _running_sum(work), _running_sum(occupancy)
        self.fluid_seconds = float(busy[-1] + step_seconds * occupied[-1])
        """Least seconds of all items, for any number of them in a step."""
        # Bisection wants scalars: arrays of doubles give them faster than numpy's and take less memory than lists.
        self._length = array("d", length.tobytes())
        self._fixed = array("d", (start_seconds + repeat).tobytes())
        self._work = array("d", busy.tobytes())
        self._occupancy = array("d", occupied.tobytes())
        self._filled = array("d", (busy + step_seconds * occupied).tobytes()) if occupied[-1] > 0 else None
        self._floor = array("d", np.maximum(length, tail).tobytes())
        self._tail = tail
        self._filling = None if filling is None else array("d", _running_sum(filling).tobytes())
        alone = start_seconds + repeat + step_seconds * np.maximum(length, tail) + work
        self.slowest_item = float(alone.max())

    def seconds(self, start: int, end: int) -> float:
        """Return the time of the share of the items `start` … `end` − 1."""
        rounds = max(self._length[start], self._occupancy[end] - self._occupancy[start])
        return self._fixed[start] + self.step * rounds + self._work[end] - self._work[start]

    def cut(self, starts: list[int]) -> Cover:
        """Return the cover whose shares begin at `starts`."""
        ends = [*starts[1:], self.count]
        seconds = tuple(self.seconds(start, end) for start, end in zip(starts, ends, strict=True))
        total = math.fsum(seconds)
        if self._tail == 0:
            return Cover(tuple(starts), seconds, max(seconds), total)
        return Cover(tuple(starts), seconds, max(map(self._limited_seconds, starts, ends)), total)

    def _limited_seconds(self, start: int, end: int) -> float:
        # If not all of a share run at once, an unforeseen response may be among the last to be admitted.
        waiting = max(0.0, self._occupancy[end] - self._occupancy[start] - self._length[start])
        rounds = self._floor[start] + waiting
        return self._fixed[start] + self.step * rounds + self._work[end] - self._work[start]

    def fill(self, limit: float, least: int, most: int, stretch: float = 0.0) -> Cover | None:
        """Return the cheapest cover of `least` to `most` shares within `limit` each, or None, in O(shares · log items).

        Args:
            stretch: a share may take this multiple of its first item's time alone if that is more than `limit`.
        """
        starts = self._starts(limit, least, most, stretch)
        return None if starts is None else self.cut(starts)

    def _starts(self, limit: float, least: int, most: int, stretch: float = 0.0) -> list[int] | None:
        length, floor, fixed, work, filled = self._length, self._floor, self._fixed, self._work, self._filled
        count, step = self.count, self.step
        starts: list[int] = []
        at = 0
        while at < count:
            if len(starts) == most:
                return None
            allowed = max(limit, stretch * self._limited_seconds(at, at + 1)) if stretch else limit
            room = allowed - fixed[at]
            reach = bisect_right(work, room - step * floor[at] + work[at], at + 1) - 1
            if filled is not None:
                spare = room - step * (floor[at] - length[at])
                reach = min(reach, bisect_right(filled, spare + filled[at], at + 1) - 1)
            if self._filling is not None:
                full = self._filling[at] + 1 + 1e-9
                reach = min(reach, max(at + 1, bisect_right(self._filling, full, at + 1) - 1))
            # Differences of running sums are rounded: an item that takes the whole limit alone still fits.
            if reach == at:
                if self._limited_seconds(at, at + 1) > allowed:
                    return None
                reach = at + 1
            starts.append(at)
            at = reach
        wanted = min(least, count)
        if len(starts) < wanted:
            # The cheapest further starts are the shortest items.
            starts += [count] * (wanted - len(starts))
            starts = [min(start, count - wanted + k) for k, start in enumerate(starts)]
        return starts

    def cheapest(self, least: int) -> Cover:
        """Return the cover of at least `least` shares with the least total, without a limit of time."""
        cover = self.fill(math.inf, least, self.count)
        assert cover is not None
        return cover

    def fastest(self, least: int, most: int, tolerance: float) -> Cover | None:
        """Return a cover of at most `most` shares whose makespan is within the ratio `tolerance` of the least possible.

        Of all covers of that makespan it has the least total. None if all samples can't run at once on so few shares.
        """
        fluid = self.start + self.fluid_seconds / most
        low = max(self.slowest_item, fluid) * (1 - 1e-12)
        starts = self._starts(math.inf, least, most)
        high = math.inf
        step = _FIRST_STEP
        while high > low * (1 + tolerance):
            # Gallop from the lower bound until something is feasible, then halve.
            limit = (low + high) / 2 if high < math.inf else low * (1 + step)
            step *= 4
            if not low < limit < high:
                break
            found = self._starts(limit, least, most)
            if found is None:
                low = limit
            else:
                starts, high = found, limit
        return None if starts is None else self.cut(starts)

    def minimise(
        self, objective: Callable[[float, float], float], fast: Cover, least: int, most: int, tolerance: float
    ) -> Cover:
        """Return the cover with the least objective(makespan, total) of those no shorter than `fast`.

        The objective must not fall when either argument rises. The search is branch and bound over the limit: between
        two limits no cover is shorter than the lower one, or cheaper than the cheapest at the upper one. It ends within
        the ratio `tolerance` of the optimum.
        """
        cheap = self.cheapest(least)
        best = min(fast, cheap, key=lambda cover: objective(cover.makespan, cover.total))
        enough = objective(best.makespan, best.total) * (1 - tolerance)
        intervals = [(objective(fast.makespan, cheap.total), fast.makespan, cheap.makespan, cheap.total)]
        while intervals:
            bound, low, high, floor = heapq.heappop(intervals)
            middle = (low + high) / 2
            if bound >= enough:
                break
            if not low < middle < high or (cover := self.fill(middle, least, most)) is None:
                continue
            value = objective(cover.makespan, cover.total) * (1 - tolerance)
            if value < enough:
                best, enough = cover, value
            # The same cover is the cheapest for every limit from its makespan to the middle.
            if cover.makespan > low:
                upper = min(middle, cover.makespan)
                heapq.heappush(intervals, (objective(low, cover.total), low, upper, cover.total))
            if cover.total > floor:
                heapq.heappush(intervals, (objective(middle, floor), middle, high, floor))
        return best


def _running_sum(values: Floats) -> Floats:
    """Return the sums of the first 0 … n values [n + 1]."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums
