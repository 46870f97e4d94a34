"""Contiguous partitions of a sorted chain of work: the optimisation under the planner.

A chain holds items sorted by length, longest first. A share of the items i … j−1 on one instance takes
    start + repeat[i] + step · max(length[i], occupancy[i … j−1]) + work[i … j−1]   seconds
(docs/policy.md derives it). Within a time limit it is best, in the number of shares and in the sum of their seconds
alike, to fill each share as far as the limit allows, from the longest item on. So a plan is one number, the limit,
and what remains is a search over limits.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cover:
    """One way to cut a chain."""

    starts: tuple[int, ...]
    """First item of each share."""
    seconds: tuple[float, ...]
    """Time of each share."""
    makespan: float
    """Time of the longest share."""
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
    ) -> None:
        self.count = len(length)
        self.step = step_seconds
        self.start = start_seconds
        self._length: list[float] = length.tolist()
        self._fixed: list[float] = (start_seconds + repeat).tolist()
        self._work: list[float] = np.concatenate(([0.0], np.cumsum(work))).tolist()
        self._occupancy: list[float] = np.concatenate(([0.0], np.cumsum(occupancy))).tolist()
        self._filled: list[float] = (
            np.concatenate(([0.0], np.cumsum(work))) + step_seconds * np.concatenate(([0.0], np.cumsum(occupancy)))
        ).tolist()
        alone = start_seconds + repeat + step_seconds * np.maximum(length, occupancy) + work
        self.slowest_item = float(alone.max())

    def seconds(self, start: int, end: int) -> float:
        """Time of the share of the items `start` … `end` − 1."""
        rounds = max(self._length[start], self._occupancy[end] - self._occupancy[start])
        return self._fixed[start] + self.step * rounds + self._work[end] - self._work[start]

    def cut(self, starts: list[int]) -> Cover:
        """The cover whose shares begin at `starts`."""
        ends = [*starts[1:], self.count]
        seconds = tuple(self.seconds(start, end) for start, end in zip(starts, ends, strict=True))
        return Cover(tuple(starts), seconds, max(seconds), math.fsum(seconds))

    def fill(self, limit: float, least: int, most: int) -> Cover | None:
        """The cheapest cover of `least` to `most` shares none of which takes longer than `limit`, or None.

        O(shares · log items).
        """
        length, fixed, work, filled, count, step = (
            self._length, self._fixed, self._work, self._filled, self.count, self.step
        )  # fmt: skip
        starts: list[int] = []
        at = 0
        while at < count:
            if len(starts) == most:
                return None
            room = limit - fixed[at]
            reach = bisect_right(work, room - step * length[at] + work[at], at + 1) - 1
            reach = min(reach, bisect_right(filled, room + filled[at], at + 1) - 1)
            # Differences of running sums are rounded: an item that takes the whole limit alone still fits.
            if reach == at and self.seconds(at, at + 1) > limit:
                return None
            starts.append(at)
            at = max(reach, at + 1)
        wanted = min(least, count)
        if len(starts) < wanted:
            # The cheapest further starts are the shortest items.
            starts += [count] * (wanted - len(starts))
            starts = [min(start, count - wanted + k) for k, start in enumerate(starts)]
        return self.cut(starts)

    def cheapest(self, least: int) -> Cover:
        """The cover of at least `least` shares with the least total, however long it takes."""
        cover = self.fill(math.inf, least, self.count)
        assert cover is not None
        return cover

    def fastest(self, least: int, most: int, tolerance: float) -> Cover:
        """A cover of at most `most` shares whose makespan is within `tolerance`, a ratio, of the least possible.

        Of all covers of that makespan it has the least total.
        """
        best = self.cheapest(least)
        fluid = self.start + (self._work[-1] + self.step * self._occupancy[-1]) / most
        low = max(self.slowest_item, fluid) * (1 - 1e-12)
        high = best.makespan
        while high > low * (1 + tolerance):
            limit = (low + high) / 2
            if not low < limit < high:
                break
            found = self.fill(limit, least, most)
            if found is None:
                low = limit
            else:
                # A share's time is a difference of sums, so that it may pass the limit by a rounding.
                best, high = found, min(limit, found.makespan)
        return best

    def minimise(
        self, objective: Callable[[float, float], float], fast: Cover, least: int, most: int, tolerance: float
    ) -> Cover:
        """The cover with the least objective(makespan, total) of those no shorter than `fast`.

        The objective must not fall when either argument rises. Branch and bound over the limit: between two limits no
        cover is shorter than the lower nor cheaper than the cheapest at the upper. It ends within `tolerance`, a
        ratio, of the optimum.
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
