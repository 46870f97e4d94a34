"""How much of a pool other jobs want, and what that does to a job's plans.

A plan weighs the seconds of a step against its GPU-seconds. The seconds are those that the step takes if its tasks get
GPUs at once. Where other jobs want the GPUs, tasks wait, and a step takes as long as the GPUs have work for. If all
jobs plan alike, its seconds are in proportion to its GPU-seconds. Actors that can't work at the same time bring nothing
and cost something: each reads the weights for every token of its longest response, where one actor would do so once.
"""

from collections.abc import Collection
from dataclasses import dataclass

from rlhfless_operator.planner.pools.decayed_sum import DecayedSum

_HALF_LIFE_SECONDS = 600.0
"""Demand counts half after this time: longer than most steps, whose stages want different numbers of GPUs."""
_ASSUMED_SECONDS = 30.0
"""How long a job has to be watched until what it does counts as much as what is assumed of it."""


class Demand:
    """The GPUs that one job wants, on average of late: those of its tasks that work or wait for GPUs.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._gpus = 0
        self._seconds = DecayedSum(_HALF_LIFE_SECONDS, now)
        self._gpu_seconds = DecayedSum(_HALF_LIFE_SECONDS, now)
        self._assumed_seconds = DecayedSum(_HALF_LIFE_SECONDS, now, _ASSUMED_SECONDS)

    def change(self, gpus: int, now: float) -> None:
        """Record that the job wants so many GPUs more from now on; fewer if the number is negative."""
        self._until(now)
        self._gpus += gpus

    def mean(self, assumed: float, now: float) -> float:
        """Return the GPUs that it has wanted on average.

        Args:
            assumed: GPUs that it is taken to want as long as little was seen of it.
        """
        seconds, gpu_seconds, assumed_seconds = self._until(now)
        return (gpu_seconds + assumed * assumed_seconds) / (seconds + assumed_seconds)

    def _until(self, now: float) -> tuple[float, float, float]:
        return self._seconds.add(1.0, now), self._gpu_seconds.add(self._gpus, now), self._assumed_seconds.add(0.0, now)


@dataclass(frozen=True)
class Contention:
    """What other jobs leave of a pool."""

    wanted: float = 0.0
    """The share of its GPU time that they want, from 0 to 1: how likely it is that a GPU which a job takes is one that
    another job works on or waits for."""
    actors: int | None = None
    """Instances of generation that the job can count on at a time: those for which the others leave GPUs, and at least
    those of its fair part; None if no other job wants GPUs."""

    def cost_weight(self, cost_weight: float) -> float:
        """λ of the job's plans, given its own.

        With T the seconds of a step that waits for no GPU, C its GPU-seconds and q what others want, a step takes,
        against the least, (1 − q) · T/T* + q · C/C*. So the weight of C/C* in (1 − λ) · time + λ · cost becomes
        λ + (1 − λ) · q. A job that is alone plans by its own λ. Where all GPUs are always wanted GPU-seconds alone
        count, as the fewest GPU-seconds a step are the most steps for all.
        """
        return cost_weight + (1 - cost_weight) * self.wanted


ALONE = Contention()
"""No other job wants the GPUs."""


def contention(others: Collection[Demand], gpus: int, gpus_per_actor: int, now: float) -> Contention:
    """What the other jobs of a pool leave of it.

    A job that has only just begun is taken to want its fair part. So jobs that begin at the same time do not all plan
    as if each were alone.

    Args:
        others: the other jobs of the pool.
        gpus: of the pool.
        gpus_per_actor: of an instance of generation; 0 for one that needs none.
    """
    if not others:
        return ALONE
    fair = gpus / (len(others) + 1)
    wanted = sum(each.mean(fair, now) for each in others)
    left = max(fair, gpus - wanted)
    actors = max(1, round(left / gpus_per_actor)) if gpus_per_actor else None
    return Contention(min(1.0, wanted / gpus) if gpus else 1.0, actors)
