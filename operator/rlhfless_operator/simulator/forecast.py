"""The forecast before a run: the time and cost of a typical step, at several weights of cost against time."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.step.least_period import least_period
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import InfeasibleError, Limits, Plan, Planner
from rlhfless_operator.planner.step.preparers import matching_preparers
from rlhfless_operator.simulator.asynchronous.long_run import long_run
from rlhfless_operator.simulator.traces import LengthStatistics, RecordedTrace, Trace, generate

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
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
        self._planner = Planner(
            samples, instance.latency, limits, instance.startup_seconds + instance.weight_load_seconds
        )

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
        others = self._others
        plan = self._planner.weighted(weight, other_seconds=others.seconds, other_instance_seconds=others.paid)
        return {"cost_weight": weight, **self._row(plan)}

    def within_deadline(self, seconds: float) -> dict[str, Any]:
        """Return the cheapest plan whose step takes at most `seconds`.

        Raises:
            InfeasibleError: naming the shortest step.
        """
        least = self._planner.least_seconds + self._others.seconds
        if seconds < least:
            raise InfeasibleError(
                f"deadline is {seconds:g} s: the fastest plan on {self._limits.max_instances} instances takes"
                f" {least:.1f} s a step, which is the nearest; or raise generation.instances.max"
            )
        return self._row(self._planner.within_deadline(seconds - self._others.seconds))

    def within_budget(self, money: Decimal) -> dict[str, Any]:
        """Return the fastest plan whose step costs at most `money`.

        Raises:
            InfeasibleError: naming the cheapest step.
            ValueError: if instances cost nothing.
        """
        if self._instance_hour <= 0:
            raise ValueError("budget is given and instances cost nothing: give --instance-hour or prices.instanceHour")
        least = self._cost(self._planner.least_instance_seconds + self._others.paid)
        if money < least:
            raise InfeasibleError(
                f"budget is {money:f}: the cheapest plan costs {least:f} a step, which is the nearest"
            )
        hours = money / self._instance_hour
        # Rounding must not make the cheapest plan too dear.
        seconds = max(float(hours) * 3600 - self._others.paid, self._planner.least_instance_seconds * (1 + 1e-9))
        return self._row(self._planner.within_budget(seconds))

    def front(self) -> list[dict[str, Any]]:
        """Return plans from the fastest to the cheapest; no plan beats one of them in both time and cost."""
        return [self._row(plan) for plan in self._planner.front()]

    def ahead(self, weight: float, max_stalenesses: Sequence[int]) -> list[dict[str, Any]]:
        """Return the plan at a weight with rollouts that go ahead of the learner. The first row is the synchronous job.

        Instances without work, the learner's included, are kept, or started anew if that takes less.
        """
        others = self._others
        plan = self._planner.weighted(weight, other_seconds=others.seconds, other_instance_seconds=others.paid)
        return [self._ahead_row(plan, most) for most in (0, *max_stalenesses)]

    def actors_beside(self, max_staleness: int) -> list[dict[str, Any]]:
        """Return a row of `ahead` for each number of actors, rising: up to the first with which the learner never
        waits, and one more.
        """
        fewest = {len(plan.shares): plan for plan in self._planner.front()}
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
        # In a synchronous job, preparation works beside generation only.
        preparers = matching_preparers(
            others.preparation,
            generation=least_period(work, others.seconds, max_staleness) if max_staleness else max(work),
            learning=others.seconds if max_staleness else 0.0,
            least=self._preparers[0],
            most=self._preparers[1],
        )
        found = long_run(
            plan.shares,
            self._instance,
            self._limits.max_batch or len(self._samples),
            max_staleness,
            learning=others.seconds,
            publishing=others.publishing,
            preparation=others.preparation,
            preparers=preparers.instances,
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

    def _row(self, plan: Plan) -> dict[str, Any]:
        gpus, others = self._instance.gpus, self._others
        return {
            "actors": len(plan.shares),
            "learner_gpus": others.learner_gpus,
            "seconds": plan.expected_seconds + self._others.seconds,
            "generation_seconds": plan.expected_seconds,
            "gpu_seconds": plan.expected_instance_seconds * gpus + others.gpu_seconds,
            "lower_bound_gpu_seconds": plan.lower_bound_instance_seconds * gpus + others.gpu_seconds,
            "cost": f"{self._cost(plan.expected_instance_seconds + self._others.paid):f}",
        }

    def _cost(self, instance_seconds: float) -> Decimal:
        return (Decimal(repr(instance_seconds)) / 3600 * self._instance_hour).quantize(Decimal("0.0001"))
