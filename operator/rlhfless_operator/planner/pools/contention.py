"""The demand of other jobs in a pool, and its effect on a job's plans.

A plan weighs the seconds of a step against its GPU-seconds. The seconds assume that the step's tasks get GPUs at once.
If other jobs want the GPUs, tasks wait, and a step takes as long as the GPUs have work. If all jobs plan alike, its
seconds are then in proportion to its GPU-seconds. Actors that can't work at the same time gain nothing and cost more:
each reads the weights for every token of its longest response, where one actor would do so once.
"""

from collections.abc import Collection
from dataclasses import dataclass

from rlhfless_operator.planner.pools.decayed_sum import DecayedSum

_HALF_LIFE_SECONDS = 600.0
"""Time after which demand counts half. It is longer than most steps, whose stages want different numbers of GPUs."""
_ASSUMED_SECONDS = 30.0
"""Time after which a job's observed demand counts as much as the assumed one."""


class Demand:
    """The GPUs that one job has wanted lately, on average: those of its tasks that work or wait for GPUs.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._gpus = 0
        self._seconds = DecayedSum(_HALF_LIFE_SECONDS, now)
        self._gpu_seconds = DecayedSum(_HALF_LIFE_SECONDS, now)
        self._assumed_seconds = DecayedSum(_HALF_LIFE_SECONDS, now, _ASSUMED_SECONDS)

    def change(self, gpus: int, now: float) -> None:
        """Record that the job wants `gpus` more GPUs from now on, or fewer if the number is negative."""
        self._until(now)
        self._gpus += gpus

    def mean(self, assumed: float, now: float) -> float:
        """Return the mean number of GPUs that it has wanted.

        Args:
            assumed: GPUs that it is assumed to want while it has not been observed for long.
        """
        seconds, gpu_seconds, assumed_seconds = self._until(now)
        return (gpu_seconds + assumed * assumed_seconds) / (seconds + assumed_seconds)

    def _until(self, now: float) -> tuple[float, float, float]:
        return self._seconds.add(1.0, now), self._gpu_seconds.add(self._gpus, now), self._assumed_seconds.add(0.0, now)


@dataclass(frozen=True)
class Contention:
    """The part of a pool that other jobs leave."""

    wanted: float = 0.0
    """Share of the pool's GPU time that they want, from 0 to 1: the chance that a GPU which a job takes is one that
    another job works on or waits for."""
    actors: int | None = None
    """Number of generation instances that the job can count on at a time: those for which the others leave GPUs, and at
    least those of its fair part. None if no other job wants GPUs."""

    def cost_weight(self, cost_weight: float) -> float:
        """Return the λ of the job's plans, given its own.

        Let T be the seconds of a step that waits for no GPU, C its GPU-seconds, and q the share that others want. Then
        a step takes, against the least, (1 − q) · T/T* + q · C/C*. So the weight of C/C* in (1 − λ) · time + λ · cost
        becomes λ + (1 − λ) · q. A job that is alone plans by its own λ. If all GPUs are always wanted, only GPU-seconds
        count: the fewest GPU-seconds a step give the most steps to all jobs.
        """
        return cost_weight + (1 - cost_weight) * self.wanted


ALONE = Contention()
"""No other job wants the GPUs."""


def contention(others: Collection[Demand], gpus: int, gpus_per_actor: int, now: float) -> Contention:
    """Return the contention that the other jobs of a pool make.

    A job that has just begun is assumed to want its fair part. So jobs that begin together do not each plan as if they
    were alone.

    Args:
        others: the other jobs of the pool.
        gpus: GPUs of the pool.
        gpus_per_actor: GPUs of a generation instance; 0 for one that needs none.
    """
    if not others:
        return ALONE
    fair = gpus / (len(others) + 1)
    wanted = sum(each.mean(fair, now) for each in others)
    left = max(fair, gpus - wanted)
    actors = max(1, round(left / gpus_per_actor)) if gpus_per_actor else None
    return Contention(min(1.0, wanted / gpus) if gpus else 1.0, actors)
