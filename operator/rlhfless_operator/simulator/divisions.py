"""The divisions of rivals: equal numbers of prompts, in the given order or ranked by their mean length."""

import math

import numpy as np

from rlhfless_operator.planner.step.loads import Indices, Loads


def equal_shares(order: Indices, columns: Loads, shares: int) -> list[Indices]:
    """Divide groups in `order` into shares with equal numbers."""
    place = np.empty(columns.groups, dtype=np.intp)
    place[order] = np.arange(columns.groups)
    count = min(shares, columns.groups)
    owner = place[columns.group] * count // columns.groups
    return [np.flatnonzero(owner == k) for k in range(count)]


def ranked_shares(columns: Loads, instances: int, cost_weight: float, start_seconds: float) -> list[Indices]:
    """Divide groups by their mean length, on the number of instances with the best time and cost, as RLHFless does."""
    means = np.zeros(columns.groups)
    means[columns.group] = columns.length
    order = np.argsort(-means, kind="stable")
    # If there are enough instances, no response waits for another to end.
    least = min(instances, math.ceil(float(columns.filled.sum())))
    most = max(least, min(instances, columns.groups))
    candidates = [equal_shares(order, columns, n) for n in range(least, most + 1)]
    times = [columns.seconds(division, start_seconds) for division in candidates]
    fastest, cheapest = min(map(max, times)), min(map(sum, times))
    values = [(1 - cost_weight) * max(each) / fastest + cost_weight * sum(each) / cheapest for each in times]
    return candidates[int(np.argmin(values))]
