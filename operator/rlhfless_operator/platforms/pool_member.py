"""A job in its pool of GPUs: the one record of the jobs that share GPUs."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from rlhfless_functions.api import Stage
from rlhfless_functions.settings.emulation import EmulationSettings
from rlhfless_operator.planner.pools.contention import Demand
from rlhfless_operator.planner.pools.decayed_sum import USE_HALF_LIFE_SECONDS, DecayedSum
from rlhfless_operator.planner.pools.whole_gpus import SwitchCost

_Part = TypeVar("_Part")
Clock = Callable[[], float]
SwitchCosts = Callable[[Stage], SwitchCost]
"""The currently known cost for a job of releasing an instance of a stage and getting one again."""


@dataclass(eq=False)
class PoolMember:
    """A job in its pool, as long as a driver works on it."""

    uid: str
    namespace: str
    name: str
    gpus: Mapping[Stage, int]
    """GPUs of an instance of each stage."""
    pool: str = "default"
    """Name of the pool."""
    jobs: list["PoolMember"] = field(default_factory=list)
    """All jobs of the pool with a driver, itself among them once it has joined. They share the list."""
    priority: int = 0
    """Priority; the higher goes first."""
    instances: Mapping[Stage, int] = field(default_factory=dict)
    """Most instances of each stage that it may request at a time; one for a missing stage."""
    together: Collection[Stage] = ()
    """Stages whose instances work only together: each step takes all of them, or fewer that are requested anew."""
    keep_alive: Mapping[Stage, float] = field(default_factory=dict)
    """Seconds that the pool keeps an idle instance if no other job needs its GPUs."""
    platform_keep_alive: Mapping[Stage, float] = field(default_factory=dict)
    """Seconds that the platform keeps an idle instance: none in a pool, which alone decides."""
    sleeps: bool = False
    """Whether its pods sleep between their tasks; otherwise they hold whole GPUs until they end."""
    emulation: EmulationSettings | None = None
    """The GPUs that its pods emulate; None if it is no rehearsal."""
    costs: SwitchCosts = lambda stage: SwitchCost()
    """Returns the cost for the job of handing a GPU over."""
    clock: Clock = time.monotonic
    """Monotonic seconds."""
    part: object | None = None
    """The pool's own record of the job, of any class; None while the job's platform is not open."""
    demand: Demand = field(init=False)
    """The GPUs that it wants, for the plans of the other jobs."""
    use: DecayedSum = field(init=False)
    """The GPU-seconds that it has had lately; of equal jobs, the one with the fewest goes first."""

    def __post_init__(self) -> None:
        self.demand = Demand(self.clock())
        self.use = DecayedSum(USE_HALF_LIFE_SECONDS, self.clock())

    @contextmanager
    def joined(self) -> Iterator["PoolMember"]:
        """Make the job one of its pool, as long as the context lasts."""
        self.jobs.append(self)
        try:
            yield self
        finally:
            self.jobs.remove(self)

    def take_part(self, part: object, used: float = 0.0) -> None:
        """Set the pool's own record of the job. An abandoned driver of the same job has none from now on.

        Args:
            used: GPU-seconds that the job is assumed to have had.
        """
        for each in self.jobs:
            if each.uid == self.uid:
                each.part = None
        self.part = part
        self.use = DecayedSum(USE_HALF_LIFE_SECONDS, self.clock(), used)

    @contextmanager
    def wanting(self, stage: Stage) -> Iterator[None]:
        """Count a task of a stage that uses or waits for GPUs, as long as the context lasts."""
        gpus = self.gpus.get(stage, 0)
        self.demand.change(gpus, self.clock())
        try:
            yield
        finally:
            self.demand.change(-gpus, self.clock())

    def most(self, stage: Stage) -> int:
        """Return the most GPUs that the instances of a stage use at a time."""
        return self.gpus.get(stage, 0) * self.instances.get(stage, 1)

    @property
    def most_at_once(self) -> int:
        """Most GPUs that it uses at a time if its stages follow each other."""
        return max(map(self.most, self.gpus))


def parts_of(jobs: Iterable[PoolMember], kind: type[_Part]) -> dict[str, _Part]:
    """Return the parts of a class that jobs have in their pool, by the job's unique id."""
    return {each.uid: each.part for each in jobs if isinstance(each.part, kind)}
