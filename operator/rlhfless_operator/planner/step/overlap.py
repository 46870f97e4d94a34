"""Preparation and learning after, or under, the tail of generation.

Complete groups may be prepared, and their gradients accumulated, while others still decode. The update is the same,
because the normaliser is applied at the end. A GPU that accumulates needs the weights and a buffer of its own, and
joins when an actor frees it. So the trainer is a fluid queue: groups bring work when they complete, and the GPUs that
have joined work it off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_MOMENTS = 24


@dataclass(frozen=True)
class TrainerRun:
    """The time and the GPUs that preparation and learning took."""

    end: float
    """Moment at which the new weights were there."""
    gpus: int
    """Number of GPUs at the end."""
    gpu_seconds: float
    """GPU-seconds held, start-ups included."""
    asked: tuple[float, ...]
    """Moments at which the GPUs held to the end were asked for."""
    let_go: tuple[tuple[float, float], ...] = ()
    """(begin, end) of each time that a GPU was held and let go before the end, to be asked for again."""


@dataclass(frozen=True)
class TrainerPlan:
    """The plan of a step's training."""

    gpus: int
    """Most GPUs that join."""
    begin: float
    """Earliest moment to ask for one."""


def run_trainer(
    arrivals: Floats, work: Floats, free_from: Floats, plan: TrainerPlan, *, start_seconds: float, update_seconds: float
) -> TrainerRun:
    """Work off groups in the order of their arrival.

    Args:
        arrivals: [groups] moments from which each group's work can be done.
        work: [groups] GPU-seconds of each.
        free_from: [GPUs] moments from which one, two, … GPUs are free, not falling.
        start_seconds: from asking for a GPU to its working.
        update_seconds: of the optimizer's step and the publication of the weights, after the last group.
    """
    order = np.argsort(arrivals, kind="stable")
    arrived = arrivals[order]
    left = np.cumsum(work[order][::-1])[::-1]
    asked = np.maximum(free_from[: plan.gpus], plan.begin)
    joined = asked + start_seconds
    # Capacity so far is the sum over the GPUs of the time since they joined. All is done when, for every group, the
    # capacity since its arrival covers its work and all that came after it.
    needed = float((_capacity(arrived, joined) + left).max())
    end = _moment_of(needed, joined)
    held = float(np.maximum(end + update_seconds - asked, 0.0).sum())
    taken = asked[asked < end + update_seconds]
    return TrainerRun(end + update_seconds, int((joined < end).sum()), held, tuple(taken.tolist()))


def plan_trainer(
    arrivals: Floats,
    work: Floats,
    free_from: Floats,
    *,
    start_seconds: float,
    update_seconds: float,
    time_price: float,
    reserved: int,
    reserve_seconds: float,
) -> TrainerPlan:
    """Choose how many GPUs may join, and from which moment: the least end · time_price + GPU-seconds.

    Args:
        arrivals: [groups] moments at which groups are expected; see `run_trainer` for the rest.
        time_price: GPU-seconds that a second of the step is worth.
        reserved: number of GPUs that the next step's instances need to start on while the trainer still works.
        reserve_seconds: delay of the next step if the trainer leaves them too few.
    """
    most = len(free_from)
    choices = sorted({min(most, 2**k) for k in range(int(math.log2(most)) + 2)} | {max(1, most - reserved)})
    begins = np.linspace(-start_seconds, float(arrivals.max()), _MOMENTS)
    gpus, begin = np.repeat(choices, _MOMENTS), np.tile(begins, len(choices))
    end, joined, held = _outcomes(arrivals, work, free_from, gpus, begin, start_seconds, update_seconds)
    late = np.where(joined > most - reserved, reserve_seconds, 0.0)
    best = int(np.argmin((end + late) * time_price + held))
    return TrainerPlan(int(gpus[best]), float(begin[best]))


def _outcomes(
    arrivals: Floats,
    work: Floats,
    free_from: Floats,
    gpus: NDArray[np.intp],
    begin: Floats,
    start_seconds: float,
    update_seconds: float,
) -> tuple[Floats, NDArray[np.intp], Floats]:
    """Return `run_trainer`'s end, GPUs that have joined by then, and GPU-seconds, for all plans at once [plans]."""
    order = np.argsort(arrivals, kind="stable")
    arrived = arrivals[order]
    left = np.cumsum(work[order][::-1])[::-1]
    free = np.maximum(free_from, begin.min())
    before = np.concatenate(([0.0], np.cumsum(free)))
    # [plans, groups] Of the GPUs that have joined when a group arrives, some were free before `begin` and joined then.
    waiting = np.searchsorted(free, begin)[:, None]
    count = np.minimum(np.searchsorted(free + start_seconds, arrived)[None, :], gpus[:, None])
    count = np.where(arrived[None, :] > begin[:, None] + start_seconds, count, 0)
    early = np.minimum(count, waiting)
    asked_sum = early * begin[:, None] + before[count] - before[early]
    needed = (count * (arrived[None, :] - start_seconds) - asked_sum + left).max(axis=1)
    # [plans, GPUs] The GPU-seconds available when the n-th GPU joins grow with n.
    asked = np.maximum(free[None, :], begin[:, None])
    taking_part = np.arange(len(free))[None, :] < gpus[:, None]
    joined = asked + start_seconds
    sums = np.cumsum(joined, axis=1)
    reached = np.arange(1, len(free) + 1) * joined - sums
    number = np.maximum(((reached < needed[:, None]) & taking_part).sum(axis=1), 1)
    end = (needed + sums[np.arange(len(begin)), number - 1]) / number
    held = np.where(taking_part, np.maximum(end[:, None] + update_seconds - asked, 0.0), 0.0).sum(axis=1)
    at_end: NDArray[np.intp] = ((joined < end[:, None]) & taking_part).sum(axis=1)
    return end + update_seconds, at_end, held


def queue(arrivals: Floats, work: Floats, servers: int = 1) -> Floats:
    """Return the moment at which each item is done by servers that work items off in the order of arrival [items].

    This is exact for one server. Several work as one that is as many times as fast. But no item is divided: none is
    done sooner than one server takes for it.

    Args:
        arrivals: [items] moments of arrival.
        work: [items] seconds that each takes one server.
    """
    if servers > 1:
        return np.maximum(queue(arrivals, work / servers), arrivals + work)
    order = np.argsort(arrivals, kind="stable")
    done = np.cumsum(work[order])
    started = np.maximum.accumulate(arrivals[order] - (done - work[order]))
    result = np.empty_like(arrivals)
    result[order] = started + done
    return result


def free_gpus(ends: Sequence[float], gpus: int, gpus_per_instance: int) -> Floats:
    """Return the moments from which one, two, … of a cluster's GPUs are free, if instances end at `ends` [GPUs]."""
    spare = max(0, gpus - len(ends) * gpus_per_instance)
    freed = np.repeat(np.sort(np.asarray(ends, dtype=np.float64)), gpus_per_instance)
    return np.concatenate((np.full(spare, -math.inf), freed))[:gpus]


def _capacity(moments: Floats, joined: Floats) -> Floats:
    """Return the GPU-seconds that have been available by each moment [moments]."""
    ranked = np.sort(joined)
    count = np.searchsorted(ranked, moments)
    sums = np.concatenate(([0.0], np.cumsum(ranked)))
    result: Floats = count * moments - sums[count]
    return result


def _moment_of(capacity: float, joined: Floats) -> float:
    """Return the moment at which the available GPU-seconds reach `capacity`."""
    ranked = np.sort(joined)
    reached = _capacity(ranked, ranked)
    count = int(np.searchsorted(reached, capacity))
    return float((capacity + ranked[:count].sum()) / max(count, 1))
