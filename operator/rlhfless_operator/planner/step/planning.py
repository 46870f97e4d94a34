"""The division of a step's samples over instances, with its time and cost."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from rlhfless_operator.planner.latency.linear import Latency
from rlhfless_operator.planner.step.bounds import lower_bound
from rlhfless_operator.planner.step.loads import Cuttable, Indices, Loads, SampleLoad
from rlhfless_operator.planner.step.partition import Cover

PolicyName = Literal["even", "cost"]

TOLERANCE = 5e-4
"""Ratio within which the search for the best plan ends."""


class InfeasibleError(ValueError):
    """No plan meets the demand; the message names it and the nearest value that can be met."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a plan."""

    min_instances: int = 1
    max_instances: int = 1
    kv_tokens: int | None = None
    """Most tokens in an instance's KV cache at a time."""
    max_batch: int | None = None
    """Most sequences in an instance's decode step."""

    def __post_init__(self) -> None:
        if self.min_instances < 1:
            raise ValueError(f"min_instances is {self.min_instances}: a step needs at least 1")
        if self.max_instances < self.min_instances:
            raise ValueError(
                f"max_instances is {self.max_instances}: it must be at least min_instances, {self.min_instances}"
            )
        for name in ("kv_tokens", "max_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: an instance holds at least 1")

    def at_most(self, instances: int | None) -> "Limits":
        """Return these limits with at most `instances`, but never below the fewest. None lowers nothing."""
        if instances is None:
            return self
        return replace(self, max_instances=max(self.min_instances, min(self.max_instances, instances)))


@dataclass(frozen=True, slots=True)
class Share:
    """The samples of one actor."""

    samples: tuple[SampleLoad, ...]
    """Samples in the order of admission."""
    expected_seconds: float
    """Seconds from asking for the instance to its last response, start-up included."""
    numbers: Indices = field(compare=False, repr=False)
    """Places of the samples among the planned ones."""


def longest_first(shares: Iterable[Share]) -> list[Share]:
    """Sort shares in the order in which their actors get instances: the longest expected time first."""
    return sorted(shares, key=lambda share: -share.expected_seconds)


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's division over instances, with its forecast."""

    policy: PolicyName
    shares: tuple[Share, ...]
    expected_seconds: float
    """Time of the slowest share, with a tail if any share may hold one."""
    expected_instance_seconds: float
    """Instance-seconds of all shares; each instance is released when its share is done."""
    cheapest_instance_seconds: float
    """Cost of the cheapest plan, without a limit of time."""
    lower_bound_instance_seconds: float
    """Lower bound on the instance-seconds of any plan in the same time (`bounds.lower_bound`)."""


@dataclass(frozen=True)
class Division:
    """Samples divided over instances, without a forecast."""

    shares: tuple[Indices, ...]
    """Numbers of each share's samples, in the order of admission."""
    seconds: tuple[float, ...] | None = None
    """Time of each share; None if it is not known exactly."""
    least_seconds: float = 0.0
    """Least seconds of the plan, with a tail if any share may hold one."""


def plan(
    policy: PolicyName,
    samples: Sequence[SampleLoad],
    latency: Latency,
    limits: Limits,
    *,
    cost_weight: float = 0.5,
    startup_seconds: float = 0.0,
    weight_load_seconds: float = 0.0,
    tail_tokens: float = 0.0,
) -> Plan:
    """Divide a step's samples over instances.

    Args:
        policy: `even`: the prompts in the given order over all instances. `cost`: the best division for the expected
            lengths.
        cost_weight: λ in [0, 1]: 0 minimises the time, 1 the instance-seconds. Only `cost` heeds it.
        startup_seconds: charged to each instance before it works.
        weight_load_seconds: charged to each instance before it works.
        tail_tokens: length of an unforeseen response that any share may turn out to hold, such as the longest response
            if some are runaways. The step then takes at least as long as that response, and shares are kept small
            enough not to delay it. Migration gathers the few that come.

    Raises:
        ValueError: for no samples, a negative length, λ outside [0, 1] or a prompt that fits no instance.
    """
    planner = Planner(samples, latency, limits, startup_seconds + weight_load_seconds, tail_tokens=tail_tokens)
    if policy == "even":
        return planner.even()
    if policy == "cost":
        return planner.weighted(cost_weight)
    raise ValueError(f"policy is {policy!r}: choose one of {', '.join(get_args(PolicyName))}")


class Planner:
    """All ways to plan the same samples.

    Args:
        start_seconds: charged to each instance before it works.
        tail_tokens: see `plan`.
        at_once: whether all samples of a share run from the start.
        tolerance: ratio within which the best plan is found.
        loads: the same samples as columns, if they exist already.

    Raises:
        ValueError: for no samples, a negative length or a prompt that fits no instance.
    """

    def __init__(
        self,
        samples: Sequence[SampleLoad],
        latency: Latency,
        limits: Limits,
        start_seconds: float = 0.0,
        *,
        tail_tokens: float = 0.0,
        at_once: bool = False,
        tolerance: float = TOLERANCE,
        loads: Loads | None = None,
    ) -> None:
        if not tail_tokens >= 0:
            raise ValueError(f"tail_tokens is {tail_tokens}: a response has 0 tokens or more")
        if not start_seconds >= 0:
            raise ValueError(f"start_seconds is {start_seconds}: an instance starts in 0 or more seconds")
        self._loads = loads or Loads(samples, latency, kv_tokens=limits.kv_tokens, max_batch=limits.max_batch)
        self._limits = limits
        self._start = start_seconds
        self._tail = tail_tokens
        self._tolerance = tolerance
        lines = self._loads.lines
        self._ways = [self._loads.whole_groups(line, start_seconds, tail_tokens, at_once=at_once) for line in lines]
        self._keeping_groups = len(self._ways)
        if self._loads.groups < len(samples):
            self._ways += [
                self._loads.single_samples(line, start_seconds, tail_tokens, at_once=at_once) for line in lines
            ]
        least, most = limits.min_instances, limits.max_instances
        found = [way.chain.fastest(least, most, tolerance / 2) for way in self._ways]
        self._fast = [cover for cover in found if cover is not None]
        if len(self._fast) < len(self._ways):
            raise InfeasibleError(
                f"max_instances is {most}: the {len(samples)} samples do not all run at once on so few instances;"
                f" use at least {math.ceil(float(self._loads.filled.sum()))}, or let samples wait"
            )
        self.least_seconds = min(cover.makespan for cover in self._fast)
        """Shortest time of any plan."""
        self.least_instance_seconds = min(way.chain.cheapest(least).total for way in self._ways)
        """Cost of the cheapest plan, without a limit of time."""

    def even(self) -> Plan:
        """Return the plan with equal numbers of prompts, in the given order, on the most instances."""
        return self.plan_of(self.dealt(self._limits.max_instances), "even")

    def dealt(self, shares: int, *, ranked: bool = False) -> Division:
        """Return the division with equal numbers of prompts in each share.

        Args:
            shares: number of shares.
            ranked: whether prompts of like mean lengths go together; else they keep the given order.
        """
        loads = self._loads
        if ranked:
            prompts = np.argsort(-np.bincount(loads.group, loads.length) / np.bincount(loads.group), kind="stable")
        else:
            _, first = np.unique(loads.group, return_index=True)
            prompts = loads.group[np.sort(first)]
        place = np.empty(loads.groups, dtype=np.intp)
        place[prompts] = np.arange(loads.groups)
        shares = min(shares, loads.groups)
        owner = place[loads.group] * shares // loads.groups
        return Division(tuple(np.flatnonzero(owner == k) for k in range(shares)))

    def weighted(self, cost_weight: float) -> Plan:
        """Return the plan with the least (1 − λ) · time / least time + λ · cost / least cost, for λ = `cost_weight`."""
        if not 0 <= cost_weight <= 1:
            raise ValueError(
                f"cost_weight is {cost_weight}: λ is between 0, for time alone, and 1, for cost alone;"
                f" the nearest is {min(1, max(0, cost_weight))}"
            )

        def objective(seconds: float, instance_seconds: float) -> float:
            return (1 - cost_weight) * seconds / self.least_seconds + (
                cost_weight * instance_seconds / self.least_instance_seconds
            )

        least, most = self._limits.min_instances, self._limits.max_instances
        covers = [
            way.chain.minimise(objective, fast, least, most, self._tolerance / 2)
            for way, fast in zip(self._ways, self._fast, strict=True)
        ]
        return self.plan_of(self._best(covers, objective))

    def within_deadline(self, seconds: float) -> Plan:
        """Return the cheapest plan that takes at most `seconds`.

        Raises:
            InfeasibleError: if none is that fast.
        """
        division = self.divided(seconds)
        if division is None:
            raise InfeasibleError(
                f"the deadline of {seconds:g} seconds cannot be met: the fastest plan on"
                f" {self._limits.max_instances} instances takes {self.least_seconds:g} seconds"
            )
        return self.plan_of(division)

    def divided(self, seconds: float) -> Division | None:
        """Return the division of `within_deadline`; None if none is that fast."""
        covers = [way.chain.fill(seconds, self._limits.min_instances, self._limits.max_instances) for way in self._ways]
        if all(cover is None for cover in covers):
            return None
        return self._best(covers, lambda _, instance_seconds: instance_seconds)

    def staggered(self, seconds: float, stretch: float) -> Division | None:
        """Return a division whose shares end early: each within `seconds`, or within `stretch` times its longest group.

        It is not the cheapest for its time, but its groups complete early. None if it needs too many instances.
        """
        least, most = self._limits.min_instances, self._limits.max_instances
        cover = self._ways[0].chain.fill(seconds, least, most, stretch)
        if cover is None:
            return None
        return self._division(self._ways[0], cover)

    def deadlines(self, points: int) -> list[float]:
        """Return deadlines from the shortest time to that of the cheapest plan, by equal ratios."""
        slowest = max(way.chain.cheapest(self._limits.min_instances).makespan for way in self._ways)
        ratio = max(1.0, slowest / self.least_seconds)
        return [self.least_seconds * (1 + 1e-9) * ratio ** (k / max(1, points - 1)) for k in range(points)]

    def front(self, points: int = 24) -> list[Plan]:
        """Return plans from the fastest to the cheapest; no plan beats one of them in both time and cost."""
        plans = [self.within_deadline(seconds) for seconds in self.deadlines(points)]
        plans.sort(key=lambda each: (each.expected_seconds, each.expected_instance_seconds))
        front: list[Plan] = []
        for each in plans:
            if not front or each.expected_instance_seconds < front[-1].expected_instance_seconds * (1 - 1e-9):
                front.append(each)
        return front

    def _best(self, covers: Sequence[Cover | None], objective: Callable[[float, float], float]) -> Division:
        """Return the division with the least objective. It keeps groups whole, unless another one gains."""
        best: list[tuple[float, int, Cover] | None] = [None, None]
        for number, cover in enumerate(covers):
            if cover is not None:
                found = objective(cover.makespan, cover.total), number, cover
                dividing = number >= self._keeping_groups
                held = best[dividing]
                if held is None or found[0] < held[0]:
                    best[dividing] = found
        whole, divided = best
        if divided is not None and (whole is None or divided[0] < whole[0] * (1 - self._tolerance)):
            _, number, cover = divided
            return Division(tuple(self._ways[number].divide(cover.starts)), least_seconds=cover.makespan)
        assert whole is not None
        _, number, cover = whole
        return self._division(self._ways[number], cover)

    def _division(self, way: Cuttable, cover: Cover) -> Division:
        """Return the division of a cover of whole groups. Its times are exact if rounds are linear."""
        exact = cover.seconds if self._loads.linear else None
        return Division(tuple(way.divide(cover.starts)), exact, cover.makespan)

    def plan_of(self, division: Division, policy: PolicyName = "cost") -> Plan:
        """Return a division with its forecast."""
        loads = self._loads
        seconds = division.seconds or loads.seconds(division.shares, self._start)
        slowest = max(*seconds, division.least_seconds) if self._tail else max(seconds)
        return Plan(
            policy=policy,
            shares=tuple(
                Share(tuple(map(loads.samples.__getitem__, chosen.tolist())), each, chosen)
                for chosen, each in zip(division.shares, seconds, strict=True)
            ),
            expected_seconds=slowest,
            expected_instance_seconds=math.fsum(seconds),
            cheapest_instance_seconds=self.least_instance_seconds,
            lower_bound_instance_seconds=lower_bound(
                loads.length,
                loads.context,
                loads.latency,
                slowest,
                prefill_tokens=loads.prefill_tokens,
                start_seconds=self._start,
                max_batch=self._limits.max_batch,
            ),
        )
