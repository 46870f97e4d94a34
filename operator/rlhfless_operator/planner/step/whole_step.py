"""The plan of generation and training together, if complete groups are trained on while others still decode.

The cheapest plan of generation alone fills every instance up to the end of the longest response. Groups then
complete late, and the trainer starves. Here every plan on the front is forecast to the end of the step: when its groups
complete, how many GPUs then work them off, and at which cost.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.step.forecast import StepForecast, Tail, Training
from rlhfless_operator.planner.step.holding import Holding
from rlhfless_operator.planner.step.loads import Loads, SampleLoad
from rlhfless_operator.planner.step.overlap import Floats, TrainerPlan
from rlhfless_operator.planner.step.planning import Division, InfeasibleError, Limits, Plan, Planner

_STRETCHES = (1.05, 1.25)
_RIVAL_COUNTS = 4
"""Number of instance counts for which equal shares are forecast."""
_POINTS = 8
"""Number of deadlines of each kind that are compared before the search goes on around the best."""
_ROUNDS = 4
_MOST_DEARER = 1.02
"""Factor by which a plan may cost more than GPUs that are held all the time, where GPUs can be held."""
_NEIGHBOUR = 1.1
"""Ratio of the first deadlines that are tried beside the best one."""


@dataclass(frozen=True)
class StepPlan:
    """A whole step."""

    generation: Plan
    trainer: TrainerPlan
    expected_seconds: float
    """Seconds to the new weights."""
    expected_gpu_seconds: float
    """GPU-seconds, counted in those of generation if stages have prices of their own."""
    time_price: float
    """GPU-seconds of generation that a second of the step is worth at its λ."""
    expected_groups: Mapping[int, float]
    """Seconds into the step from which each prompt's group can be learnt from: when it is prepared if preparation has
    GPUs of its own, else when it is generated."""
    preparers: int = 0
    """Number of instances that prepare; 0 if preparation has no GPUs of its own."""
    holds: bool = False
    """Whether instances and the learner stay on the GPUs of this division, like static actors. Nothing is started or
    let go, and an instance that is emptied leaves its GPUs to the learner."""
    otherwise: tuple[float, float] | None = None
    """Seconds and GPU-seconds of the best step that lets instances go where this one holds them, or the other way
    round; None if there was no choice."""


def plan_step(
    samples: Sequence[SampleLoad],
    profile: InstanceProfile,
    limits: Limits,
    training: Training,
    *,
    cost_weight: float,
    ready_seconds: float,
    tail_tokens: float = 0.0,
    runaways: Mapping[int, float] | None = None,
    holding: Holding | None = None,
    known: bool = True,
) -> StepPlan:
    """Return the plan with the least (1 − λ) · time / least time + λ · GPU-seconds / least GPU-seconds of the step.

    Args:
        ready_seconds: seconds into the step from which instances can work; their start-up and loading are charged in
            any case.
        tail_tokens: length of a runaway; 0 if there can be none.
        runaways: share of each prompt's responses that are runaways.
        holding: costs of keeping an instance and the learner on a GPU; None if that is not possible.
        known: whether most prompts have a history. If not, samples have lengths that may be those of others.
    """
    if not 0 <= cost_weight <= 1:
        raise ValueError(
            f"cost_weight is {cost_weight}: λ is between 0 and 1; the nearest is {min(1, max(0, cost_weight))}"
        )
    charged = profile.startup_seconds + profile.weight_load_seconds
    loads = Loads(samples, profile.latency, kv_tokens=limits.kv_tokens, max_batch=limits.max_batch)
    tokens: Floats = np.bincount(loads.group, loads.context + loads.length, loads.groups).astype(np.float64)
    tail = Tail.of(loads, tail_tokens, runaways or {})
    # Unforeseen runaways add tokens to learn from.
    tokens += tail.unplanned * tail.tokens
    work: Floats = training.token_gpu_seconds * tokens
    planners = [Planner(samples, profile.latency, limits, charged, loads=loads)]
    # A share whose samples wait is cheap, but these end late, and a runaway among them ends last of all.
    with suppress(InfeasibleError):
        planners.append(
            Planner(samples, profile.latency, limits, charged, tail_tokens=tail_tokens, at_once=True, loads=loads)
        )
    if tail_tokens:
        planners.append(Planner(samples, profile.latency, limits, charged, tail_tokens=tail_tokens, loads=loads))
    search = _Search(loads, profile, training, work, tokens, ready_seconds, tail, cost_weight, holding, known)
    for planner in planners:
        search.try_all([_Choice(planner, seconds) for seconds in planner.deadlines(_POINTS // 2)])
    planner = planners[0]
    begin = charged + loads.longest_away
    limits_of = np.geomspace(begin + (planner.least_seconds - begin) / 16, planner.least_seconds, _POINTS)
    search.try_all([_Choice(planner, float(limit), stretch) for limit in limits_of for stretch in _STRETCHES])
    search.try_rivals(planner, limits)
    search.refine(_ROUNDS)
    return search.best()


@dataclass(frozen=True)
class _Choice:
    """A way to divide the samples: within a deadline, or staggered."""

    planner: Planner
    seconds: float
    stretch: float = 0.0

    def divide(self) -> Division | None:
        if self.stretch:
            return self.planner.staggered(self.seconds, self.stretch)
        return self.planner.divided(self.seconds)


@dataclass(frozen=True)
class _Outcome:
    """A division, forecast to the end of the step."""

    choice: _Choice
    division: Division
    ready: Floats
    """[groups] Moment from which each can be learnt from."""
    trainer: TrainerPlan
    seconds: float
    gpu_seconds: float
    preparers: int = 0
    holds: bool = False


class _Search:
    """Divisions that have been forecast, and the best of them."""

    def __init__(
        self,
        loads: Loads,
        profile: InstanceProfile,
        training: Training,
        work: Floats,
        tokens: Floats,
        ready_seconds: float,
        tail: Tail,
        cost_weight: float,
        holding: Holding | None,
        known: bool,
    ) -> None:
        self._holding, self._known = holding, known
        self._even: tuple[bytes, ...] = ()
        """Division of static actors: equal shares of all instances, in the given order."""
        self._static: _Outcome | None = None
        """Outcome of static actors; None if no GPU can be held."""
        self._loads, self._profile, self._training = loads, profile, training
        self._work, self._tokens = work, tokens
        self._ready, self._tail = ready_seconds, tail
        self._cost_weight = cost_weight
        weight = max(cost_weight, 1e-3)
        self._odds = (1 - weight) / weight
        self._price: float | None = None
        self._tried: set[tuple[bytes, ...]] = set()
        self._outcomes: list[_Outcome] = []

    def try_all(self, choices: Sequence[_Choice]) -> None:
        """Forecast the divisions of these choices that exist and that were not forecast before."""
        divisions = [(choice, choice.divide()) for choice in choices]
        self._forecast([(choice, division) for choice, division in divisions if division is not None])

    def try_rivals(self, planner: Planner, limits: Limits) -> None:
        """Forecast the divisions of other systems: equal numbers of prompts, in the given order or ranked."""
        most = min(limits.max_instances, self._loads.groups)
        least = min(most, max(limits.min_instances, math.ceil(float(self._loads.filled.sum()))))
        counts = sorted({round(count) for count in np.geomspace(least, most, _RIVAL_COUNTS)})
        rivals = [planner.dealt(count, ranked=True) for count in counts]
        choice = _Choice(planner, planner.least_seconds)
        self._forecast([(choice, division) for division in rivals])
        even = planner.dealt(most)
        self._even = _key(even)
        self._tried.discard(self._even)
        self._forecast([(choice, even)])

    def refine(self, rounds: int) -> None:
        """Try deadlines and stretches beside those of the best, nearer in each round."""
        ratio = _NEIGHBOUR
        for _ in range(rounds):
            best = self._best().choice
            near = [replace(best, seconds=best.seconds * ratio), replace(best, seconds=best.seconds / ratio)]
            if best.stretch:
                near += [replace(best, stretch=1 + (best.stretch - 1) * factor) for factor in (ratio**3, ratio**-3)]
            self.try_all(near)
            ratio = math.sqrt(ratio)

    def best(self) -> StepPlan:
        """Return the plan with the least weighted sum."""
        found, price = self._best(), self._odds * self._cheapest() / self._fastest()
        plan = found.choice.planner.plan_of(found.division)
        _, first = np.unique(self._loads.group, return_index=True)
        expected = dict(zip(self._loads.prompt[first].tolist(), found.ready.tolist(), strict=True))
        return StepPlan(
            plan,
            found.trainer,
            found.seconds,
            found.gpu_seconds,
            price,
            expected,
            preparers=found.preparers,
            holds=found.holds,
            otherwise=self._otherwise(found),
        )

    def _otherwise(self, found: _Outcome) -> tuple[float, float] | None:
        others = [each for each in self._outcomes if each.holds != found.holds]
        best = min(others, key=self._weighing(), default=None)
        return None if best is None else (best.seconds, best.gpu_seconds)

    def _best(self) -> _Outcome:
        return min(self._allowed(), key=self._weighing())

    def _weighing(self) -> Callable[[_Outcome], float]:
        """Return the function of an outcome that is to be least."""
        fastest, cheapest, weight = self._fastest(), self._cheapest(), self._cost_weight
        return lambda each: (1 - weight) * each.seconds / fastest + weight * each.gpu_seconds / cheapest

    def _allowed(self) -> list[_Outcome]:
        """Return the outcomes that are no worse than static actors, if GPUs can be held as theirs are."""
        static = self._static
        if static is None:
            return self._outcomes
        return [each for each in self._outcomes if _never_worse(each, static)]

    def _fastest(self) -> float:
        return min(each.seconds for each in self._allowed())

    def _cheapest(self) -> float:
        return min(each.gpu_seconds for each in self._allowed())

    def _forecast(self, divisions: Sequence[tuple[_Choice, Division]]) -> None:
        fresh = []
        for choice, division in divisions:
            key = _key(division)
            if key not in self._tried:
                self._tried.add(key)
                forecast = StepForecast(division, self._loads, self._profile, self._ready, self._tail)
                fresh.append((choice, division, forecast))
        if not fresh:
            return
        if self._price is None:
            # A first guess of the price of time chooses each trainer. The best plan is chosen once the rest is known.
            guess = min(each.gpu_seconds for *_, each in fresh) + float(self._work.sum())
            self._price = self._odds * guess / min(each.end for *_, each in fresh)
        for choice, division, forecast in fresh:
            forecast.take(self._price)
            if self._training.preparers:
                for count in self._training.preparers:
                    self._outcomes += self._trained_apart(choice, division, forecast, count)
                continue
            found = forecast.trained(self._work, self._training, self._price, len(division.shares))
            self._outcomes.append(_Outcome(choice, division, forecast.completions, *found))
            if self._holding is not None and (self._known or _key(division) == self._even):
                held = forecast.held(self._work, self._training, self._holding)
                self._outcomes.append(_Outcome(choice, division, forecast.completions, found[0], *held, holds=True))
                if _key(division) == self._even:
                    self._static = self._outcomes[-1]

    def _trained_apart(
        self, choice: _Choice, division: Division, forecast: StepForecast, preparers: int
    ) -> list[_Outcome]:
        """Return the outcomes of a division with `preparers` preparation instances, one for each learner option."""
        training, tokens = self._training, self._tokens
        ready = forecast.prepared(self._work, training, preparers)
        found = [forecast.learnt(ready, tokens, training, each, preparers) for each in training.learners]
        if not found:
            found = [forecast.trained_apart(ready, tokens, training, preparers)]
        holding = training.holding
        if holding is None:
            return [_Outcome(choice, division, ready, *each, preparers=preparers) for each in found]
        outcomes = []
        for trainer, seconds, gpu_seconds in found:
            goes = seconds + holding.late_seconds
            outcomes.append(_Outcome(choice, division, ready, trainer, goes, gpu_seconds, preparers))
            stays = holding.stay(seconds, len(division.shares), preparers, trainer.gpus)
            outcomes.append(_Outcome(choice, division, ready, trainer, *stays, preparers, holds=True))
        return outcomes


def _never_worse(outcome: _Outcome, static: _Outcome) -> bool:
    """Return whether an outcome is not dearer than static actors by more than 2 %, and not slower at equal cost."""
    if outcome.gpu_seconds * _MOST_DEARER < static.gpu_seconds:
        return True
    return outcome.gpu_seconds <= _MOST_DEARER * static.gpu_seconds and outcome.seconds <= static.seconds


def _key(division: Division) -> tuple[bytes, ...]:
    return tuple(share.tobytes() for share in division.shares)
