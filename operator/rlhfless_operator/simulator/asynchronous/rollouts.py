"""Ours in discrete events: steps that learn from whole rollouts, which overlap on the instances.

The rules are those of `training/rollouts_ahead.py` and `training/instance_queue.py`, and staleness, the plans, the
predictions of lengths and what is remembered of earlier steps are the live loop's own code. Every response ends with
the weights that began it. Two things of the live loop are left out: a live step takes complete groups of any rollouts,
where these learn from their own, and samples move between the actors of a live rollout.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless_operator.planner.bounds import least_held
from rlhfless_operator.planner.history import History
from rlhfless_operator.simulator.asynchronous.live_plans import LivePlans
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import Group, Outcome, Step, StepShares
from rlhfless_operator.simulator.instance import Instance, Response
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.training.staleness import last_step_begun, steps_ahead


class Plans(Protocol):
    """How steps are divided."""

    def plan(self, groups: Sequence[Group]) -> StepShares:
        """The plan of the next step."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """A step's groups are complete."""
        ...


def run_rollouts(
    scenario: Scenario,
    system: Rollouts,
    split: Split,
    batches: Iterator[list[Group]],
    steps: int,
    *,
    plans: Plans | None = None,
) -> Outcome:
    """Run until the learner has taken so many steps.

    Args:
        batches: the groups of each step, without end.
        plans: how a step is divided; as the live loop's `cost` policy does if left out.
    """
    history = History()
    return _Run(scenario, system, split, batches, plans or LivePlans(scenario, system, split, history), history).until(
        steps
    )


@dataclass
class _Rollout:
    """A step's rollout that is under way, or waits for the learner."""

    step: int
    groups: list[Group]
    version: int
    begin: float
    shares: list[list[Response]]
    """Of actors that have no instance yet, those that begin first at the end."""
    actors: int
    preparers: int
    """Most groups that are prepared at a time."""
    preparing: int = 0
    left: int = field(init=False)
    """Actors that have anything left."""
    ends: dict[int, float] = field(default_factory=dict)
    """By group, when the last of its responses that have begun ends."""
    unknown: dict[int, int] = field(init=False)
    """By group, responses that have not begun."""
    unprepared: int = field(init=False)
    """Groups that are not prepared."""

    def __post_init__(self) -> None:
        self.left = self.actors
        self.unknown = {group.number: len(group.lengths) for group in self.groups}
        self.unprepared = len(self.groups)


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        system: Rollouts,
        split: Split,
        batches: Iterator[list[Group]],
        plans: Plans,
        history: History,
    ) -> None:
        self._scenario, self._system, self._split, self._batches = scenario, system, split, batches
        self._profile = scenario.profile()
        self._plans, self._history = plans, history
        self._events: list[tuple[float, int, str, int, int]] = []
        self._number = 0
        self._rollouts: dict[int, _Rollout] = {}
        """By step, those that the learner has not finished."""
        self._begun = 0
        self._admitted = last_step_begun(0, system.max_staleness)
        """The last step whose rollout may begin."""
        self._at_work = 0
        self._idle: list[int] = []
        """Versions that idle instances have."""
        self._unprepared: list[tuple[int, int]] = []
        """(step, group) of complete groups, those to be prepared first in front."""
        self._learning = False
        self._uses: list[tuple[float, float]] = []
        self._preparer_uses: list[tuple[float, float]] = []
        self._learner_uses: list[tuple[float, float]] = []
        self._worked: list[tuple[float, float]] = []
        """Of each actor: what it used an instance for besides loading."""
        self._steps: list[Step] = []

    def until(self, steps: int) -> Outcome:
        now = 0.0
        while len(self._steps) < steps:
            self._begin(now)
            self._deal(now)
            self._prepare(now)
            self._learn(now)
            now, _, kind, step, which = heapq.heappop(self._events)
            if kind == "actor":
                self._actor_ends(step)
            elif kind == "complete":
                self._completes(step, which, now)
            elif kind == "prepared":
                self._rollouts[step].preparing -= 1
                self._prepared(step, now)
            elif kind == "learnt":
                self._learnt(step, now)
        return self._outcome(now)

    # --- generation ---

    def _begin(self, now: float) -> None:
        """Begin rollouts as long as staleness allows it, and there is an instance that no actor has or waits for."""
        while self._begun < self._admitted and (self._has_room() or self._earlier_is_made()):
            self._begun += 1
            groups = next(self._batches)
            plan = self._plans.plan(groups)
            self._rollouts[self._begun] = _Rollout(
                self._begun, groups, len(self._steps), now, plan.shares[::-1], len(plan.shares), plan.preparers
            )
            self._deal(now)

    def _has_room(self) -> bool:
        left = sum(rollout.left for rollout in self._rollouts.values())
        return left == 0 or left < self._most()

    def _earlier_is_made(self) -> bool:
        earlier = self._rollouts.get(self._begun)
        return earlier is None or not earlier.unprepared

    def _most(self) -> int:
        return max((rollout.actors for rollout in self._rollouts.values() if rollout.left), default=0)

    def _deal(self, now: float) -> None:
        """Give free instances to actors that wait, those of an earlier step first."""
        for rollout in self._rollouts.values():
            while rollout.shares and self._at_work < self._most():
                self._at_work += 1
                self._act(rollout, rollout.shares.pop(), now)

    def _act(self, rollout: _Rollout, share: list[Response], now: float) -> None:
        """An actor has an instance, and works until it has nothing left."""
        if rollout.version in self._idle:
            self._idle.remove(rollout.version)
            ready = now
        else:
            if self._idle:
                self._idle.pop()
            ready = now + self._profile.weight_load_seconds
        instance = Instance(
            "actor", self._profile.latency, ready, max_batch=self._split.sequences, kv_tokens=self._profile.kv_tokens
        )
        instance.add(share)
        end = ready
        for end, (number, _) in instance.advance(1e12):
            rollout.ends[number] = max(end, rollout.ends.get(number, 0.0))
            rollout.unknown[number] -= 1
            if not rollout.unknown[number]:
                self._announce(rollout.ends[number], "complete", rollout.step, number)
        self._worked.append((ready, end))
        self._uses.append((now, end))
        self._announce(end, "actor", rollout.step)

    def _actor_ends(self, step: int) -> None:
        rollout = self._rollouts[step]
        rollout.left -= 1
        self._at_work -= 1
        self._idle.append(rollout.version)

    # --- preparation and learning ---

    def _completes(self, step: int, number: int, now: float) -> None:
        if self._split.preparers:
            heapq.heappush(self._unprepared, (step, number))
        else:
            self._prepared(step, now)

    def _prepare(self, now: float) -> None:
        """An instance prepares a group at a time, those of an earlier step first: as many as each step's plan says, and
        as many instances as the largest of them."""
        under_way = [rollout for rollout in self._rollouts.values() if rollout.unprepared]
        free = max((rollout.preparers for rollout in under_way), default=0)
        free -= sum(rollout.preparing for rollout in under_way)
        waiting: list[tuple[int, int]] = []
        while free > 0 and self._unprepared:
            step, number = heapq.heappop(self._unprepared)
            rollout = self._rollouts[step]
            if rollout.preparing == rollout.preparers:
                waiting.append((step, number))
                continue
            tokens = rollout.groups[number - rollout.groups[0].number].tokens
            free -= 1
            rollout.preparing += 1
            end = now + self._scenario.preparation_gpu_seconds(tokens) / self._scenario.gpus_per_instance
            self._preparer_uses.append((now, end))
            self._announce(end, "prepared", step)
        for each in waiting:
            heapq.heappush(self._unprepared, each)

    def _prepared(self, step: int, now: float) -> None:
        rollout = self._rollouts[step]
        rollout.unprepared -= 1
        if rollout.unprepared:
            return
        self._history.add("rollout", now - rollout.begin)
        self._plans.observe(rollout.groups)

    def _learn(self, now: float) -> None:
        """The learner takes steps in their order, each when it is prepared as a whole."""
        rollout = self._rollouts.get(len(self._steps) + 1)
        if self._learning or rollout is None or rollout.unprepared:
            return
        tokens = sum(group.tokens for group in rollout.groups)
        work = self._scenario.learning_gpu_seconds(tokens)
        if not self._split.preparers:
            work += self._scenario.preparation_gpu_seconds(tokens)
        end = now + work / self._split.learner_gpus + self._scenario.update_seconds
        self._learning = True
        self._learner_uses.append((now, end))
        self._announce(end, "learnt", rollout.step)

    def _learnt(self, step: int, now: float) -> None:
        self._learning = False
        rollout = self._rollouts.pop(step)
        self._steps.append(Step(now, tuple(rollout.groups), (rollout.version,) * len(rollout.groups)))
        history = self._history
        history.add("learning", now - self._learner_uses[-1][0])
        ahead = steps_ahead(self._system.max_staleness, history.mean("rollout"), history.mean("learning"))
        self._admitted = max(self._admitted, last_step_begun(len(self._steps), ahead))

    def _announce(self, at: float, kind: str, step: int, which: int = 0) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, kind, step, which))

    def _outcome(self, now: float) -> Outcome:
        """What was held until now: what has no work is kept, or let go and started in time, as costs less."""
        scenario = self._scenario

        def held(uses: list[tuple[float, float]], start: float) -> float:
            until_now = [(begin, min(end, now)) for begin, end in uses if begin < now]
            return least_held(until_now, start_seconds=start, drain_seconds=0.0)

        gpus = scenario.gpus_per_instance
        learner = self._split.learner_gpus
        return Outcome(
            tuple(self._steps),
            generation_busy=sum(min(end, now) - ready for ready, end in self._worked if ready < now) * gpus,
            generation_held=held(self._uses, self._profile.startup_seconds) * gpus,
            learner_busy=sum(end - begin for begin, end in self._learner_uses) * learner,
            learner_held=held(self._learner_uses, scenario.trainer_start_seconds) * learner,
            preparer_held=held(self._preparer_uses, self._profile.startup_seconds) * gpus,
        )
