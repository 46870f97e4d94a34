"""Preparation and learning after, or under, the tail of generation.

Complete groups may be prepared, and their gradients accumulated, while others still decode: the update is the same,
since the normaliser is applied at the end. A GPU that accumulates needs the weights and a buffer of its own and joins
when an actor frees it. So the trainer is a fluid queue: groups bring work when they complete, and the GPUs that have
joined work it off.
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
    """What preparing and learning took."""

    end: float
    """When the new weights were there."""
    gpus: int
    """GPUs at the end."""
    gpu_seconds: float
    """GPU-seconds held, start-ups included."""
    asked: tuple[float, ...]
    """When each GPU was asked for, up to the end."""


@dataclass(frozen=True)
class TrainerPlan:
    """How a step is to be trained on."""

    gpus: int
    """Most GPUs that join."""
    begin: float
    """Earliest moment to ask for one."""


def run_trainer(
    arrivals: Floats,
    work: Floats,
    free_from: Floats,
    plan: TrainerPlan,
    *,
    start_seconds: float,
    update_seconds: float,
) -> TrainerRun:
    """Work off groups in the order of their arrival.

    Args:
        arrivals: [groups] when each group's work can be done.
        work: [groups] GPU-seconds of each.
        free_from: [GPUs] when one, two, … GPUs are free, not falling.
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
    """Choose how many GPUs may join and from when: the least end · time_price + GPU-seconds.

    Args:
        arrivals: [groups] when groups are expected; see `run_trainer` for the rest.
        time_price: GPU-seconds that a second of the step is worth.
        reserved: GPUs that the next step's instances need to start on while the trainer still works.
        reserve_seconds: by which the next step is late where the trainer leaves them too few.
    """
    most = len(free_from)
    choices = sorted({min(most, 2**k) for k in range(int(math.log2(most)) + 2)} | {max(1, most - reserved)})
    last = float(arrivals.max())
    best, best_value = TrainerPlan(most, last), math.inf
    for gpus in choices:
        for begin in np.linspace(-start_seconds, last, _MOMENTS):
            plan = TrainerPlan(gpus, float(begin))
            run = run_trainer(
                arrivals, work, free_from, plan, start_seconds=start_seconds, update_seconds=update_seconds
            )
            late = reserve_seconds if run.gpus > most - reserved else 0.0
            value = (run.end + late) * time_price + run.gpu_seconds
            if value < best_value:
                best, best_value = plan, value
    return best


def free_gpus(ends: Sequence[float], gpus: int, gpus_per_instance: int) -> Floats:
    """[GPUs] when one, two, … of a cluster's GPUs are free, instances being released at `ends`."""
    spare = max(0, gpus - len(ends) * gpus_per_instance)
    freed = np.repeat(np.sort(np.asarray(ends, dtype=np.float64)), gpus_per_instance)
    return np.concatenate((np.full(spare, -math.inf), freed))[:gpus]


def _capacity(moments: Floats, joined: Floats) -> Floats:
    """[moments] GPU-seconds that have been available by each."""
    ranked = np.sort(joined)
    count = np.searchsorted(ranked, moments)
    sums = np.concatenate(([0.0], np.cumsum(ranked)))
    result: Floats = count * moments - sums[count]
    return result


def _moment_of(capacity: float, joined: Floats) -> float:
    """When the GPU-seconds available reach `capacity`."""
    ranked = np.sort(joined)
    reached = _capacity(ranked, ranked)
    count = int(np.searchsorted(reached, capacity))
    return float((capacity + ranked[:count].sum()) / max(count, 1))
