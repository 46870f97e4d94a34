"""Generation and training planned together, where complete groups are trained on while others still decode.

The cheapest plan of generation alone fills every instance up to the end of the longest response, so that groups
complete late and the trainer starves. Here every plan on the front is forecast to the end of the step: when its groups
complete, how many GPUs then work them off, and what that costs.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from rlhfless_operator.planner.latency import InstanceProfile
from rlhfless_operator.planner.loads import Loads, SampleLoad
from rlhfless_operator.planner.overlap import Floats, TrainerPlan, free_gpus, plan_trainer, queue, run_trainer
from rlhfless_operator.planner.planning import InfeasibleError, Limits, Plan, Planner

_STRETCHES = (1.05, 1.25)


@dataclass(frozen=True, slots=True)
class Training:
    """What preparation and learning take, for a forecast."""

    gpus: int
    """GPUs of the cluster: those that no instance holds may train."""
    token_gpu_seconds: float
    """GPU-seconds of preparation and learning for each token of a sample, its prompt included."""
    start_seconds: float
    """From asking for a GPU to its working."""
    update_seconds: float
    """The optimizer's step and the publication of the weights."""
    preparation_price: float = 1.0
    """What a GPU-second of preparation costs, in GPU-seconds of generation."""
    learning_price: float = 1.0
    """What a GPU-second of learning costs, in GPU-seconds of generation."""
    own_gpus: int = 0
    """GPUs that do nothing else, all the step long; where there are some, instances leave none to training."""
    afterwards_seconds: float = 0.0
    """What those do once all groups are done, where it can't begin under the tail."""
    accumulation_token_seconds: float = 0.0
    """What they do besides for each token of a sample, on a GPU of its own, as soon as its group is prepared."""


@dataclass(frozen=True)
class StepPlan:
    """A whole step."""

    generation: Plan
    trainer: TrainerPlan
    expected_seconds: float
    """To the new weights."""
    expected_gpu_seconds: float
    """At the price of generation's, where stages have prices of their own."""
    time_price: float
    """GPU-seconds of generation that a second of the step is worth at its λ."""
    expected_groups: Mapping[int, float]
    """By prompt, seconds into the step when its group can be learnt from: when it is generated, and where preparation
    has GPUs of its own, when it is prepared."""


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
    points: int = 8,
) -> StepPlan:
    """The plan with the least (1 − λ) · time / least time + λ · GPU-seconds / least GPU-seconds of the whole step.

    Args:
        ready_seconds: into the step, when instances can work; their start-up and loading are charged in any case.
        tail_tokens: length of a runaway, where there may be some; else 0.
        runaways: by prompt, the share of its responses that are runaways.
        points: plans of the front that are compared.
    """
    if not 0 <= cost_weight <= 1:
        raise ValueError(
            f"cost_weight is {cost_weight}: λ is between 0 and 1; the nearest is {min(1, max(0, cost_weight))}"
        )
    charged = profile.startup_seconds + profile.weight_load_seconds
    loads = Loads(samples, profile.latency, kv_tokens=limits.kv_tokens, max_batch=limits.max_batch)
    sizes = np.bincount(loads.group, minlength=loads.groups)
    tokens: Floats = np.bincount(loads.group, loads.context + loads.length, loads.groups).astype(np.float64)
    work: Floats = training.token_gpu_seconds * tokens
    delayed = _delayed(loads, sizes, runaways or {}) if tail_tokens else np.zeros(loads.groups, dtype=bool)
    planners = [Planner(samples, profile.latency, limits, charged, loads=loads)]
    # A share that lets samples wait is cheap, but they end late, and a runaway among them last of all.
    with suppress(InfeasibleError):
        planners.append(
            Planner(samples, profile.latency, limits, charged, tail_tokens=tail_tokens, at_once=True, loads=loads)
        )
    if tail_tokens:
        planners.append(Planner(samples, profile.latency, limits, charged, tail_tokens=tail_tokens, loads=loads))
    planner = planners[0]
    candidates = [plan for each in planners for plan in each.front(points // 2)]
    candidates += [
        plan
        for limit in np.geomspace(charged + (planner.least_seconds - charged) / 16, planner.least_seconds, points)
        for stretch in _STRETCHES
        if (plan := planner.staggered(float(limit), stretch)) is not None
    ]
    forecasts = [_Forecast(plan, loads, profile, ready_seconds, tail_tokens, delayed) for plan in candidates]
    # A first guess of what time is worth chooses each trainer, and with all of them known the best plan is chosen.
    weight = max(cost_weight, 1e-3)
    guess = min(each.gpu_seconds for each in forecasts) + float(work.sum())
    price = (1 - weight) / weight * guess / min(each.end for each in forecasts)
    outcomes = [each.trained(work, tokens, training, price, len(each.plan.shares)) for each in forecasts]
    fastest = min(seconds for _, seconds, _ in outcomes)
    cheapest = min(cost for _, _, cost in outcomes)
    values = [(1 - cost_weight) * seconds / fastest + cost_weight * cost / cheapest for _, seconds, cost in outcomes]
    best = int(np.argmin(values))
    trainer, seconds, cost = outcomes[best]
    ready = forecasts[best].completions
    if training.own_gpus:
        ready = queue(ready, work / training.own_gpus)
    _, first = np.unique(loads.group, return_index=True)
    expected = dict(zip(loads.prompt[first].tolist(), ready.tolist(), strict=True))
    price = (1 - weight) / weight * cheapest / fastest
    return StepPlan(forecasts[best].plan, trainer, seconds, cost, price, expected)


class _Forecast:
    """When the groups of a plan complete and its instances are free."""

    def __init__(
        self,
        plan: Plan,
        loads: Loads,
        profile: InstanceProfile,
        ready: float,
        tail_tokens: float,
        delayed: np.ndarray[tuple[int], np.dtype[np.bool_]],
    ) -> None:
        self.plan = plan
        self._profile = profile
        completions = np.zeros(loads.groups)
        self._ends = []
        tail = 0.0
        for share in plan.shares:
            chosen = share.numbers
            ends = loads.ends(chosen, ready)
            np.maximum.at(completions, loads.group[chosen], ends)
            # A share that does not fit a batch takes longer than if all ran from the start.
            took = share.expected_seconds - profile.startup_seconds - profile.weight_load_seconds + ready
            self._ends.append(max(took, float(ends.max())))
            rounds = float(loads.length[chosen].max())
            if float(loads.occupancy[chosen].sum()) > rounds:
                # Not all run from the start, and a runaway may be among the last to be admitted.
                rounds = float(loads.length[chosen].mean())
            late = max(0.0, tail_tokens - rounds) * profile.latency.step_seconds if tail_tokens else 0.0
            tail = max(tail, self._ends[-1] + late)
        self.end = max(self._ends)
        if delayed.any():
            # Migration gathers the runaways on the last instance, which stays for them.
            self._ends[int(np.argmax(self._ends))] = self.end = max(self.end, tail)
            completions[delayed] = self.end
        self.completions: Floats = completions
        charged = profile.startup_seconds + profile.weight_load_seconds - ready
        self.gpu_seconds = profile.gpus * math.fsum(end + charged for end in self._ends)

    def trained(
        self, work: Floats, tokens: Floats, training: Training, price: float, instances: int
    ) -> tuple[TrainerPlan, float, float]:
        """The best trainer at a price of time, and the step's seconds and GPU-seconds with it."""
        gpus = self._profile.gpus
        if training.own_gpus:
            return self._trained_apart(work, tokens, training)
        free = free_gpus(self._ends, training.gpus, gpus)
        trainer = plan_trainer(
            self.completions,
            work,
            free,
            start_seconds=training.start_seconds,
            update_seconds=training.update_seconds,
            time_price=price,
            reserved=instances * gpus,
            reserve_seconds=self._profile.startup_seconds,
        )
        run = run_trainer(
            self.completions,
            work,
            free,
            trainer,
            start_seconds=training.start_seconds,
            update_seconds=training.update_seconds,
        )
        late = self._profile.startup_seconds if run.gpus > training.gpus - instances * gpus else 0.0
        return trainer, run.end + late, self.gpu_seconds + run.gpu_seconds

    def _trained_apart(self, work: Floats, tokens: Floats, training: Training) -> tuple[TrainerPlan, float, float]:
        """Preparation is a queue under generation; so is accumulation, as far as there is any, under both."""
        prepared = queue(self.completions, work / training.own_gpus)
        accumulated = training.accumulation_token_seconds * tokens
        end = float(queue(prepared, accumulated).max())
        # Whoever begins so late that nothing is ever waited for is done as early as whoever begins at once.
        begin = max(0.0, end - float(accumulated.sum()))
        seconds = end + training.update_seconds + training.afterwards_seconds
        afterwards = training.update_seconds + training.afterwards_seconds
        paid = end * training.preparation_price + afterwards * training.learning_price
        return TrainerPlan(training.own_gpus, begin), seconds, self.gpu_seconds + training.own_gpus * paid


def _delayed(
    loads: Loads, sizes: np.ndarray[tuple[int], np.dtype[np.intp]], runaways: Mapping[int, float]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[groups] which to expect at the end only: as many as have a runaway on average, the likeliest ones."""
    _, first = np.unique(loads.group, return_index=True)
    share = np.array([runaways.get(int(prompt), 0.0) for prompt in loads.prompt[first]])
    likely = 1 - (1 - share) ** sizes
    count = math.ceil(float(likely.sum()) - 1e-9)
    delayed = np.zeros(loads.groups, dtype=bool)
    delayed[np.argsort(-likely, kind="stable")[:count]] = True
    return delayed
