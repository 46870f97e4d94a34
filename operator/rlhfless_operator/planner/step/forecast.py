"""The forecast of a division of a step's samples: when groups complete, which GPUs train on them, and when that ends.

For responses that do not end by themselves, only their number is foreseen. Policies treat them differently while others
decode: they gather them on one instance, as late cuts do, or on a few, or leave them where they are. A division is
forecast in each of these ways, and the best is taken.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus, Stage
from rlhfless_operator.planner.step.chunks import first_chunk
from rlhfless_operator.planner.step.holding import Held, Holding, StagesHolding, held_for
from rlhfless_operator.planner.step.learner_scaling import LearnerOption
from rlhfless_operator.planner.step.loads import Loads
from rlhfless_operator.planner.step.overlap import Floats, TrainerPlan, free_gpus, plan_trainer, queue, run_trainer
from rlhfless_operator.planner.step.planning import Division

_MOST_ARRIVALS = 64
"""Most groups for which the choice of a trainer considers each one."""


@dataclass(frozen=True, slots=True)
class Training:
    """The time and the price of preparation and learning, for a forecast."""

    gpus: int
    """GPUs of the cluster; those that no instance holds may train."""
    token_gpu_seconds: float
    """GPU-seconds of preparation and learning for each token of a sample, its prompt included."""
    start_seconds: float
    """From asking for a GPU to its working."""
    update_seconds: float
    """The optimizer's step and the publication of the weights."""
    preparation_price: float = 1.0
    """Price of a GPU-second of preparation, in GPU-seconds of generation."""
    learning_price: float = 1.0
    """Price of a GPU-second of learning, in GPU-seconds of generation."""
    preparers: tuple[int, ...] = ()
    """Allowed numbers of preparation instances, rising, if preparation and learning have GPUs of their own. Each
    instance has one GPU while groups are generated and prepared. Generation instances then leave no GPUs to
    training."""
    preparer_start_seconds: float = 0.0
    """Seconds of a preparation instance's start or wake that no forecast hides."""
    preparer_idle_seconds: float = 0.0
    """Further seconds for which each preparation instance beyond the fewest is held: started, drained, or kept."""
    afterwards_seconds: float = 0.0
    """Learner's seconds after all groups are done, if it can't begin under the tail."""
    accumulation_token_seconds: float = 0.0
    """Learner's further seconds for each token of a sample, as soon as its group is prepared."""
    learners: tuple[LearnerOption, ...] = ()
    """Numbers of learning instances to choose from, if there are preparers. They replace the two times above."""
    follows: bool = False
    """Whether one of `learners` accumulates under the tail; else it begins when all groups are prepared."""
    learning_instances: int = 1
    """Number of learning instances, if there are no `learners` to choose from."""
    learner_idle_seconds: float = 0.0
    """Seconds for which each of them is held in a step without working: started, drained, or kept."""
    holding: StagesHolding | None = None
    """Costs of keeping all instances for the whole step, if there are preparers; None if that is not possible."""
    shared: SharedGpus | None = None
    """GPUs on which the stages take turns, if there are preparers; None if they can all have theirs at once."""


@dataclass(frozen=True)
class Tail:
    """The runaways: responses that do not end by themselves. No sample is known to be one."""

    tokens: float
    """Length of each; 0 if there are none."""
    expected: Floats
    """[samples] Chance that each is a runaway; 0 for samples that are planned as one."""
    delayed: NDArray[np.bool_]
    """[groups] Whether to expect each at the end only: the likeliest groups, as many as have a runaway on average."""
    unplanned: Floats
    """[groups] Mean number of unplanned runaways, gathered in the delayed groups."""
    work_seconds: float
    """Seconds that one adds to the time of the instance that decodes it, besides its steps."""

    @classmethod
    def of(cls, loads: Loads, tokens: float, shares: Mapping[int, float]) -> Self:
        """Return the tail of a step.

        Args:
            tokens: length of a runaway; 0 if there are none.
            shares: by prompt, the share of its responses that are runaways.
        """
        if not tokens:
            nothing = np.zeros(loads.groups)
            return cls(0.0, np.zeros(len(loads.length)), nothing.astype(bool), nothing, 0.0)
        sizes = np.bincount(loads.group, minlength=loads.groups)
        _, first = np.unique(loads.group, return_index=True)
        share = np.array([shares.get(int(prompt), 0.0) for prompt in loads.prompt[first]])
        likely = 1 - (1 - share) ** sizes
        delayed = np.zeros(loads.groups, dtype=bool)
        delayed[np.argsort(-likely, kind="stable")[: math.ceil(float(likely.sum()) - 1e-9)]] = True
        planned = loads.length >= tokens
        unplanned = np.maximum(0.0, share * sizes - np.bincount(loads.group, planned, loads.groups))
        expected = np.where(planned, 0.0, (unplanned / sizes)[loads.group])
        work = loads.alone.sequence_work(float(loads.context.mean()), tokens)
        gathered = delayed * (float(unplanned.sum()) / max(1, int(delayed.sum())))
        return cls(tokens, expected, delayed, gathered, work)


@dataclass(frozen=True)
class _Gathering:
    """The ends of a step's instances with one way to treat the tail."""

    ends: list[float]
    """[instances] Mean moment at which each is released."""
    end: float
    """Moment at which the last response ends."""

    def objective(self, time_price: float) -> float:
        """Return the instance-seconds, with a second of time priced at `time_price` of them."""
        return math.fsum(self.ends) + time_price * self.end


class StepForecast:
    """The forecast of a division: when its groups complete, its instances are free, and all is learnt."""

    def __init__(self, division: Division, loads: Loads, profile: InstanceProfile, ready: float, tail: Tail) -> None:
        self._profile, self._tail = profile, tail
        # If not all run from the start, a runaway may be the last to be admitted.
        decoded = loads.decoded(division.shares, ready, tail.tokens)
        waiting = loads.latest(decoded.waiting)
        self._completions: Floats = loads.latest(decoded.ends)
        self._ahead: Floats = _spread(waiting.max() - waiting, tail)
        ends = decoded.last
        if tail.delayed.any():
            order = np.concatenate(division.shares)
            sizes = np.array([len(chosen) for chosen in division.shares])
            runaways = np.add.reduceat(tail.expected[order], np.cumsum(sizes) - sizes)
            self._ways = _gatherings(ends, decoded.tail_end, runaways, tail.work_seconds)
        else:
            self._ways = [_Gathering(ends.tolist(), float(ends.max()))]
        charged = profile.startup_seconds + profile.weight_load_seconds - ready
        self._charged = charged * len(ends)
        self.take(0.0)

    def take(self, time_price: float) -> None:
        """Choose the best way to move the tail, at a price of time in GPU-seconds."""
        gpus = self._profile.gpus
        best = min(self._ways, key=lambda way: way.objective(time_price / gpus))
        self._ends, self.end = best.ends, best.end
        self.completions = self._completed(best.end)
        self.gpu_seconds = gpus * (math.fsum(best.ends) + self._charged)

    def trained(
        self, work: Floats, training: Training, price: float, instances: int
    ) -> tuple[TrainerPlan, float, float]:
        """Return the best trainer at a price of time, and the step's seconds and GPU-seconds with it."""
        gpus = self._profile.gpus
        free = free_gpus(self._ends, training.gpus, gpus)
        trainer = plan_trainer(
            *_gathered(self.completions, work),
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

    def held(self, work: Floats, training: Training, holding: Holding) -> tuple[float, float]:
        """Return the step's seconds and GPU-seconds if instances and the learner stay on the division's GPUs.

        Nothing is let go. An instance that is emptied leaves its GPUs to the learner. If GPUs that hold nothing yet are
        started, the step is charged its part of that start.
        """
        gpus = len(self._ends) * self._profile.gpus
        run = run_trainer(
            self.completions,
            work,
            free_gpus(self._ends, gpus, self._profile.gpus),
            TrainerPlan(gpus, 0.0),
            start_seconds=0.0,
            update_seconds=training.update_seconds,
        )
        held = Held(gpus, max(0, gpus - holding.gpus), holding.start_seconds)
        return held_for(run.end, [held], holding.late_seconds)

    def prepared(self, work: Floats, training: Training, preparers: int) -> Floats:
        """Return the moment at which each group is prepared by `preparers` instances [groups]."""
        begin = first_chunk(self.completions, preparers)
        if training.shared is not None:
            begin = max(begin, self._left_to(training.shared, {"preparation": preparers}))
        return queue(np.maximum(self.completions, begin + training.preparer_start_seconds), work, preparers)

    def learnt(
        self, prepared: Floats, tokens: Floats, training: Training, option: LearnerOption, preparers: int
    ) -> tuple[TrainerPlan, float, float]:
        """Return the trainer, and the step's seconds and GPU-seconds with a number of learning instances.

        Args:
            prepared: [groups] moments at which they are prepared.
            preparers: number of instances that prepare.
        """
        learning = option.token_seconds * tokens
        preparation_end, total = float(prepared.max()), float(learning.sum())
        begin = self._learns_from(prepared, training, option.instances, preparers)
        if training.follows:
            end = float(queue(np.maximum(prepared, begin), learning).max())
        else:
            end = max(preparation_end, begin) + total
        held = total + option.rest_seconds + option.idle_seconds
        paid = _preparers_held(preparation_end, training, preparers) * training.preparation_price
        paid += option.instances * held * training.learning_price
        trainer = TrainerPlan(option.instances, max(0.0, end - total))
        return trainer, end + option.rest_seconds, self.gpu_seconds + paid

    def trained_apart(
        self, prepared: Floats, tokens: Floats, training: Training, preparers: int
    ) -> tuple[TrainerPlan, float, float]:
        """Return the trainer, and the step's seconds and GPU-seconds with the learning instances that there are.

        Accumulation, if there is any, is a queue behind preparation.

        Args:
            prepared: [groups] moments at which they are prepared.
            preparers: number of instances that prepare.
        """
        accumulated = training.accumulation_token_seconds * tokens
        learners, total = training.learning_instances, float(accumulated.sum())
        from_when = self._learns_from(prepared, training, learners, preparers)
        end = float(queue(np.maximum(prepared, from_when), accumulated).max())
        # A learner that begins so late that it never waits is done as early as one that begins at once.
        begin = max(0.0, end - total)
        afterwards = training.update_seconds + training.afterwards_seconds
        paid = _preparers_held(float(prepared.max()), training, preparers) * training.preparation_price
        paid += learners * (total + afterwards + training.learner_idle_seconds) * training.learning_price
        return TrainerPlan(learners, begin), end + afterwards, self.gpu_seconds + paid

    def _learns_from(self, prepared: Floats, training: Training, learners: int, preparers: int) -> float:
        """Return the moment from which the learning instances have GPUs: beside preparation, or after it."""
        shared = training.shared
        if shared is None:
            return -math.inf
        after = max(float(prepared.max()), self._left_to(shared, {"learning": learners}))
        both: dict[Stage, int] = {"preparation": preparers, "learning": learners}
        return after if shared.used(both) > shared.count else min(after, self._left_to(shared, both))

    def _left_to(self, shared: SharedGpus, working: Mapping[Stage, int]) -> float:
        """Return the moment from which actors leave GPUs to so many instances of other stages."""
        if not (gpus := shared.used(working)):
            return -math.inf
        free = free_gpus(self._ends, shared.count, shared.per_instance.get("generation", 0))
        return float(free[min(gpus, shared.count) - 1])

    def _completed(self, end: float) -> Floats:
        """Return the moment at which each group is complete, if the last response ends at `end` [groups]."""
        delayed = np.maximum(self._completions, end - self._ahead)
        completed: Floats = np.where(self._tail.delayed, delayed, self._completions)
        return completed


def _preparers_held(end: float, training: Training, preparers: int) -> float:
    """Return the GPU-seconds of `preparers` preparation instances in a step whose groups are prepared at `end`."""
    return preparers * end + (preparers - training.preparers[0]) * training.preparer_idle_seconds


def _gathered(arrivals: Floats, work: Floats) -> tuple[Floats, Floats]:
    """Merge groups that arrive one after another, so that few are left: enough to choose a trainer."""
    if len(arrivals) <= _MOST_ARRIVALS:
        return arrivals, work
    order = np.argsort(arrivals, kind="stable")
    first = np.arange(_MOST_ARRIVALS) * len(arrivals) // _MOST_ARRIVALS
    return np.maximum.reduceat(arrivals[order], first), np.add.reduceat(work[order], first)


def _spread(ahead: Floats, tail: Tail) -> Floats:
    """Return the seconds by which the runaway of each delayed group ends before the last runaway [groups].

    They are 0 for the other groups. A runaway that begins earlier ends earlier by as much. Any group may have one, not
    only the likeliest groups. So the delayed groups are spread evenly over the moments at which groups begin, the last
    moment included.
    """
    count = int(tail.delayed.sum())
    result = np.zeros_like(ahead)
    if count:
        delayed = np.flatnonzero(tail.delayed)
        # As np.quantile does, in an eighth of its time.
        places = np.arange(count) / count * (len(ahead) - 1)
        quantiles = np.interp(places, np.arange(len(ahead)), np.sort(ahead))
        result[delayed[np.argsort(ahead[delayed], kind="stable")]] = quantiles
    return result


def _gatherings(ends: Floats, late: Floats, runaways: Floats, work_seconds: float) -> list[_Gathering]:
    """Return every way to treat a tail: leave it, or gather it on the one, two, four, … instances that end last.

    An instance that holds r runaways on average holds at least one with the chance 1 - exp(-r).

    Args:
        ends: [instances] moments at which they end their foreseen work.
        late: [instances] moments at which they would end if the last sample that each admits were a runaway.
        runaways: [instances] mean number of runaways that each is given.
        work_seconds: seconds that a runaway adds to its instance besides its steps.
    """
    apart = np.maximum(ends, late) + runaways * work_seconds
    ways = [_Gathering((ends + -np.expm1(-runaways) * (apart - ends)).tolist(), float(apart.max()))]
    order = np.argsort(ends, kind="stable")
    count = 1
    while count < len(ends) or count == 1:
        each = float(runaways.sum()) / count
        kept = order[-count:]
        end = max(float(ends.max()), float(late.max())) + each * work_seconds
        found = ends.copy()
        # Groups that are expected at the end have a runaway: one instance stays for them in any case.
        found[kept] += -math.expm1(-each) * (end - ends[kept])
        found[kept[-1]] = end
        ways.append(_Gathering(found.tolist(), end))
        count *= 2
    return ways
