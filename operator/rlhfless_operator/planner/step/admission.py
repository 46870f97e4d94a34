"""The admission of a share's responses to an instance whose batch has no room for all at once, and their ends."""

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.latency.linear import Latency

Floats = NDArray[np.float64]

ROUNDING = 1e-9
"""Rounding error by which a full instance may seem to be more than full."""


@dataclass(frozen=True)
class Admission:
    """A share's responses in the order of admission."""

    begin: Floats
    """[responses] Decode steps that the instance has made when each is admitted; they do not fall."""
    end: Floats
    """[responses] Decode steps that it has made when each ends."""


def admit(length: Floats, filled: Floats) -> Admission:
    """Admit responses in the given order, each as soon as there is room for it, in O(n log n).

    Args:
        length: [responses] steps of each.
        filled: [responses] part of the instance that each fills while it runs.
    """
    count = len(length)
    if float(filled.sum()) <= 1 + ROUNDING:
        return Admission(np.zeros(count), length)
    lengths = length.tolist()
    if float(filled.min()) == float(filled.max()):
        batch = max(1, int(1 / float(filled[0]) + ROUNDING))
        begin = _by_number(lengths, batch)
    else:
        begin = _by_room(lengths, filled.tolist())
    found = np.array(begin)
    return Admission(found, found + length)


def _by_number(lengths: list[float], batch: int) -> list[float]:
    running = lengths[:batch]
    heapq.heapify(running)
    begin = [0.0] * len(running)
    for length in lengths[batch:]:
        now = running[0]
        begin.append(now)
        heapq.heapreplace(running, now + length)
    return begin


def _by_room(lengths: list[float], filled: list[float]) -> list[float]:
    running: list[tuple[float, float]] = []
    begin: list[float] = []
    now, room = 0.0, 1.0 + ROUNDING
    for length, part in zip(lengths, filled, strict=True):
        while running and room < part:
            now, freed = heapq.heappop(running)
            room += freed
        begin.append(now)
        room -= part
        heapq.heappush(running, (now + length, part))
    return begin


def seconds_at_ends(admission: Admission, context: Floats, prefill: Floats, latency: Latency) -> Floats:
    """Return the seconds from the instance's first step until each response ends [responses].

    This is exact for such an admission: between two events the batch is the same, and a decode step's time grows
    linearly with the context. An admission's prefill delays all others. With drafts, steps are rounds, and the number
    of tokens drafted between two events is the best for the mean context there.

    Args:
        context: [responses] tokens that each begins with.
        prefill: [responses] seconds that each admission takes.
    """
    begin, end = admission.begin, admission.end
    count = len(begin)
    moments = np.concatenate((begin, end))
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    batch = np.cumsum(np.concatenate((np.ones(count), -np.ones(count)))[order])[:-1]
    steps = np.diff(moments)
    jumps = np.concatenate((context, -(context + end - begin)))[order]
    contexts = np.cumsum(jumps)[:-1] + np.concatenate(([0.0], np.cumsum(batch * steps)[:-1]))
    decoding = np.empty(2 * count)
    decoding[order] = np.concatenate(
        (
            [0.0],
            np.cumsum(steps * latency.round_seconds(batch, contexts + batch * steps / 2)),
        )
    )
    # A sample that is admitted at the step in which a response ends is admitted after it.
    admitted = np.maximum(np.searchsorted(begin, end), np.arange(1, count + 1) * (end <= begin))
    result: Floats = decoding[count:] + np.concatenate(([0.0], np.cumsum(prefill)))[admitted]
    return result
