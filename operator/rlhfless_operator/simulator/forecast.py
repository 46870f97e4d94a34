"""The forecast before a run: the time and cost of a typical step, at several weights of cost against time."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.step.async_planning import lag_of_pieces
from rlhfless_operator.planner.step.chunks import before_last_chunk, first_chunk
from rlhfless_operator.planner.step.least_period import least_period
from rlhfless_operator.planner.step.loads import Loads, SampleLoad
from rlhfless_operator.planner.step.overlap import queue
from rlhfless_operator.planner.step.planning import InfeasibleError, Limits, Plan, Planner
from rlhfless_operator.planner.step.preparers import PreparerChoice, matching_preparers
from rlhfless_operator.simulator.asynchronous.long_run import long_run
from rlhfless_operator.simulator.traces import LengthStatistics, RecordedTrace, Trace, generate

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_PLANS = 48
"""Most plans to choose from."""
_CLEARLY = Decimal("0.98")
"""Cost over another one from which on a plan is shown as one of its own."""
_ALL_THE_TIME = 0.99
"""Part of its time from which a learner counts as working all the time."""


@dataclass(frozen=True)
class Others:
    """The time and cost of a step besides generation."""

    seconds: float = 0.0
    """Seconds after generation: learning and the publication of the weights. Preparation goes on beside generation."""
    gpu_seconds: float = 0.0
    """GPU-seconds of preparation and learning."""
    paid_seconds: float | None = None
    """The instance-seconds of generation that cost as much; None if a generation instance is a GPU of theirs."""
    preparation: float = 0.0
    """Instance-seconds of preparation alone."""
    learner_gpus: int = 1
    """GPUs that learn."""
    learner_price: float = 1.0
    """Price of the learner over that of a generation instance."""
    publishing: float = 0.0
    """Part of `seconds` in which the weights are on their way and the learner can take the next step."""
    beside: float = 0.0
    """Part of `seconds` that the learner may spend on groups while others are generated: all but the optimizer's step
    and the publication. 0 if it begins with the whole batch."""

    @property
    def paid(self) -> float:
        """Instance-seconds of generation with the same cost."""
        return self.gpu_seconds if self.paid_seconds is None else self.paid_seconds


def typical_step(
    lengths: LengthStatistics | Trace | RecordedTrace, *, prompts: int, samples: int, longest: int
) -> list[SampleLoad]:
    """Return the groups of a step: generated, or drawn from the last visits of a trace.

    Args:
        samples: number of samples of a group. If the trace has another number, they are drawn from the group's.
        longest: tokens at which responses are truncated.
    """
    random = np.random.default_rng(0)
    if isinstance(lengths, LengthStatistics):
        trace = generate(lengths, epochs=1, prompts=prompts, samples=samples, seed=0)
        groups = [(int(trace.prompt_tokens[row]), trace.response_tokens[0, row].tolist()) for row in range(prompts)]
    else:
        last = {prompt: group for step in _steps(lengths) for prompt, group in step.items()}
        drawn = random.choice(sorted(last), size=prompts, replace=prompts > len(last)).tolist()
        groups = [(int(lengths.prompt_tokens[prompt]), last[prompt]) for prompt in drawn]
    return [
        SampleLoad(number, index, prompt_tokens, float(min(longest, tokens)))
        for number, (prompt_tokens, group) in enumerate(groups)
        for index, tokens in enumerate(group if len(group) == samples else random.choice(group, size=samples).tolist())
    ]


def _steps(trace: Trace | RecordedTrace) -> list[dict[int, list[int]]]:
    if isinstance(trace, RecordedTrace):
        return [step.lengths for step in trace.recorded]
    return [dict(enumerate(trace.response_tokens[-1].tolist()))]


def matching_actors(rows: Sequence[dict[str, Any]]) -> int | None:
    """Return the fewest actors with which the learner always has work; None if the most do not suffice.

    Args:
        rows: of `Forecast.actors_beside`.
    """
    return min((row["actors"] for row in rows if row["learning_busy"] >= _ALL_THE_TIME), default=None)


def undominated(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that no other beats in both time and cost, from the fastest to the cheapest."""
    front: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["seconds"], Decimal(row["cost"]))):
        if not front or Decimal(row["cost"]) < Decimal(front[-1]["cost"]):
            front.append(row)
    return front


def distinct(front: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a front that are clearly cheaper than the last one before them, and the cheapest."""
    found: list[dict[str, Any]] = []
    for row in front:
        if not found or Decimal(row["cost"]) < _CLEARLY * Decimal(found[-1]["cost"]) or row is front[-1]:
            found.append(row)
    return found


@dataclass(frozen=True)
class _Found:
    """A plan of generation with the step that it makes."""

    plan: Plan
    seconds: float
    """Seconds of the whole step."""
    paid: float
    """Instance-seconds of generation that cost as much as the step."""


class Forecast:
    """The plans that a step may have. Seconds and costs are of the whole step.

    Args:
        samples: to generate.
        instance_hour: price of a generation instance for an hour.
        preparers: fewest and most instances that may prepare.

    Raises:
        ValueError: for no samples, a negative length or a prompt that fits no instance.
    """

    def __init__(
        self,
        samples: Sequence[SampleLoad],
        instance: InstanceProfile,
        limits: Limits,
        *,
        instance_hour: Decimal,
        others: Others | None = None,
        preparers: tuple[int, int] = (1, 1),
    ) -> None:
        self._samples = samples
        self._others = others or Others()
        self._preparers = preparers
        self._instance_hour = instance_hour
        self._limits = limits
        self._instance = instance
        self._startup = instance.startup_seconds
        self._loads = Loads(samples, instance.latency, kv_tokens=limits.kv_tokens, max_batch=limits.max_batch)
        self._start = instance.startup_seconds + instance.weight_load_seconds
        self._planner = Planner(samples, instance.latency, limits, self._start, loads=self._loads)

    @cached_property
    def _found(self) -> list[_Found]:
        """Plans from the fastest to the cheapest, by generation alone."""
        return [
            _Found(plan, self._seconds(plan), plan.expected_instance_seconds + self._others.paid)
            for plan in self._planner.front(_PLANS)
        ]

    def _seconds(self, plan: Plan) -> float:
        """Return the seconds of a step with this plan."""
        others = self._others
        whole = plan.expected_seconds + others.seconds
        if not others.beside:
            return whole
        # As in the loop, a learner learns from groups once they are prepared, and from the last chunk at the end.
        completions = self._loads.latest(
            self._loads.decoded([each.numbers for each in plan.shares], self._start, 0.0).ends
        )
        tokens = np.bincount(self._loads.group, self._loads.context + self._loads.length)
        share = tokens / tokens.sum()
        preparers = self._matching([each.expected_seconds - self._startup for each in plan.shares], 0).instances
        begun = np.maximum(completions, first_chunk(completions, preparers))
        prepared = queue(begun, others.preparation * share, preparers)
        learnt = float(queue(prepared, others.beside * share).max())
        last = float(prepared.max()) + others.beside - before_last_chunk(others.beside)
        return min(whole, max(learnt, last) + others.seconds - others.beside)

    def weighted(self, weight: float) -> dict[str, Any]:
        """Return the plan at a weight of cost against time.

        Raises:
            ValueError: for a weight outside 0 to 1, naming the nearest.
        """
        if not 0 <= weight <= 1:
            raise ValueError(
                f"lambda is {weight}: it is between 0, for time alone, and 1, for cost alone;"
                f" the nearest is {min(1, max(0, weight))}"
            )
        return {"cost_weight": weight, **self._row(self._weighted(weight))}

    def _weighted(self, weight: float) -> _Found:
        fastest, cheapest = min(each.seconds for each in self._found), min(each.paid for each in self._found)
        return min(self._found, key=lambda each: (1 - weight) * each.seconds / fastest + weight * each.paid / cheapest)

    def within_deadline(self, seconds: float) -> dict[str, Any]:
        """Return the cheapest plan whose step takes at most `seconds`.

        Raises:
            InfeasibleError: naming the shortest step.
        """
        intime = [each for each in self._found if each.seconds <= seconds]
        if not intime:
            least = min(each.seconds for each in self._found)
            raise InfeasibleError(
                f"deadline is {seconds:g} s: the fastest plan on {self._limits.max_instances} instances takes"
                f" {least:.1f} s a step, which is the nearest; or raise generation.instances.max"
            )
        return self._row(min(intime, key=lambda each: each.paid))

    def within_budget(self, money: Decimal) -> dict[str, Any]:
        """Return the fastest plan whose step costs at most `money`.

        Raises:
            InfeasibleError: naming the cheapest step.
            ValueError: if instances cost nothing.
        """
        if self._instance_hour <= 0:
            raise ValueError("budget is given and instances cost nothing: give --instance-hour or prices.instanceHour")
        affordable = [each for each in self._found if self._cost(each.paid) <= money]
        if not affordable:
            least = self._cost(min(each.paid for each in self._found))
            raise InfeasibleError(
                f"budget is {money:f}: the cheapest plan costs {least:f} a step, which is the nearest"
            )
        return self._row(min(affordable, key=lambda each: each.seconds))

    def front(self) -> list[dict[str, Any]]:
        """Return plans from the fastest to the cheapest; no plan beats one of them in both time and cost."""
        return undominated([self._row(each) for each in self._found])

    def ahead(self, weight: float, max_stalenesses: Sequence[int]) -> list[dict[str, Any]]:
        """Return the plan at a weight with rollouts that go ahead of the learner. The first row is the synchronous job.

        Instances without work, the learner's included, are kept, or started anew if that takes less.
        """
        plan = self._weighted(weight).plan
        return [self._ahead_row(plan, most) for most in (0, *max_stalenesses)]

    def actors_beside(self, max_staleness: int) -> list[dict[str, Any]]:
        """Return a row of `ahead` for each number of actors, rising: up to the first with which the learner never
        waits, and one more.
        """
        fewest = {len(each.plan.shares): each.plan for each in self._found}
        rows: list[dict[str, Any]] = []
        for _, plan in sorted(fewest.items()):
            enough = bool(rows) and rows[-1]["learning_busy"] >= _ALL_THE_TIME
            rows.append(self._ahead_row(plan, max_staleness))
            if enough:
                break
        return rows

    def _ahead_row(self, plan: Plan, max_staleness: int) -> dict[str, Any]:
        others, startup = self._others, self._startup
        work = [share.expected_seconds - startup for share in plan.shares]
        preparers = self._matching(work, max_staleness)
        found = long_run(
            plan.shares,
            self._instance,
            self._limits.max_batch or len(self._samples),
            max_staleness,
            learning=others.seconds,
            publishing=others.publishing,
            preparation=others.preparation,
            preparers=preparers.instances,
            in_pieces=others.beside > 0,
        )
        idle = found.seconds * (1 - found.generation_busy)
        generating = found.generation_seconds + len(work) * min(startup, max(0.0, idle))
        waiting = min(startup, max(0.0, found.seconds - others.seconds))
        return {
            "max_staleness": max_staleness,
            "actors": len(work),
            "preparers": preparers.instances,
            "preparers_reason": preparers.reason,
            "seconds": found.seconds,
            "generation_busy": min(1.0, found.generation_busy),
            "learning_busy": min(1.0, found.learning_busy),
            "staleness": found.staleness,
            "gpu_seconds": generating * self._instance.gpus + waiting * others.learner_gpus + others.gpu_seconds,
            "cost": f"{self._cost(generating + waiting * others.learner_price + others.paid):f}",
        }

    def _matching(self, work: Sequence[float], max_staleness: int) -> PreparerChoice:
        """Return the preparation instances that match a plan.

        Args:
            work: seconds of each generation instance, without its start.
        """
        others = self._others
        lag = lag_of_pieces(others.seconds, others.beside)
        # In a synchronous job, preparation works beside generation only.
        return matching_preparers(
            others.preparation,
            generation=least_period(work, others.seconds, max_staleness, lag=lag) if max_staleness else max(work),
            learning=others.seconds if max_staleness else 0.0,
            least=self._preparers[0],
            most=self._preparers[1],
        )

    def _row(self, found: _Found) -> dict[str, Any]:
        gpus, others, plan = self._instance.gpus, self._others, found.plan
        return {
            "actors": len(plan.shares),
            "learner_gpus": others.learner_gpus,
            "seconds": found.seconds,
            "generation_seconds": plan.expected_seconds,
            "gpu_seconds": plan.expected_instance_seconds * gpus + others.gpu_seconds,
            "lower_bound_gpu_seconds": plan.lower_bound_instance_seconds * gpus + others.gpu_seconds,
            "cost": f"{self._cost(found.paid):f}",
        }

    def _cost(self, instance_seconds: float) -> Decimal:
        return (Decimal(repr(instance_seconds)) / 3600 * self._instance_hour).quantize(Decimal("0.0001"))
