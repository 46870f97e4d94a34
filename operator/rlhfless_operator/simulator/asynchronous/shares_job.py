"""Rollouts with actors of their own, in discrete events, for forecasts of the long run.

A plan divides each rollout, and the divisions wait for instances. Every response ends with the weights that began it,
and no sample moves between actors.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.stage_instances import RolloutPart, StageInstances
from rlhfless_operator.planner.step.planning import Share, longest_first
from rlhfless_operator.simulator.asynchronous.job import AsynchronousJob, Rollout, StageSeconds
from rlhfless_operator.simulator.asynchronous.systems import Rollouts
from rlhfless_operator.simulator.asynchronous.work import Group, ShareEnds, StepShares, share_ends


def ends_of_shares(
    shares: Iterable[Share], groups: Iterable[Group], profile: InstanceProfile, sequences: int
) -> list[ShareEnds]:
    """Return the ends of a plan's responses, in the order in which its actors get instances.

    Args:
        shares: their prompts are the numbers of groups.
        sequences: most sequences that an instance decodes at a time.
    """
    responses = {response.key: response for group in groups for response in group.responses()}
    return [
        share_ends((responses[sample.prompt, sample.index] for sample in share.samples), profile, sequences)
        for share in longest_first(shares)
    ]


class Plans(Protocol):
    """The plans of rollouts."""

    def plan(self, groups: Sequence[Group]) -> StepShares:
        """Return the plan of the next rollout."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """Record that a rollout's groups are complete."""
        ...


class SharesJob(AsynchronousJob):
    """A job whose rollouts have actors of their own; `plans` divide them, and the rest is as of `AsynchronousJob`."""

    def __init__(
        self,
        system: Rollouts,
        size: int,
        seconds: StageSeconds,
        plans: Plans,
        history: History,
        batches: Iterator[list[Group]],
        *,
        total: float = math.inf,
        least: int = 0,
    ) -> None:
        super().__init__(system, size, seconds, plans, history, batches, total=total, least=least)
        self._plans = plans
        self._generators: StageInstances[ShareEnds] = StageInstances()
        self._parts: dict[int, RolloutPart] = {}
        """Part of the instances that each rollout has."""
        self._idle: list[int] = []
        """Versions that idle instances have."""

    def _begin(self, now: float) -> None:
        """Begin rollouts that may begin, while an instance is free that no actor waits for."""
        while self._begun < self._admitted and (self._generators.has_room or self._begun not in self._rollouts):
            self._begun += 1
            groups = {group.number: group for group in self._draw()}
            plan = self._plans.plan(list(groups.values()))
            generators = self._generators.begin(self._begun, len(plan.shares))
            preparers = self._preparers.begin(self._begun, plan.preparers)
            self._parts[self._begun] = generators
            self._enter(Rollout(self._begun, groups, self._written, now, generators.left, preparers))
            for share in plan.shares:
                self._generators.wait(generators, share)
            self._deal(now)
        self._deal(now)

    def _deal(self, now: float) -> None:
        """Give free instances to actors that wait."""
        while (dealt := self._generators.deal()) is not None:
            part, share = dealt
            self._act(self._rollouts[part.step], share, now)

    def _act(self, rollout: Rollout, share: ShareEnds, now: float) -> None:
        """Let an actor with an instance work until it has nothing left."""
        if rollout.version in self._idle:
            self._idle.remove(rollout.version)
            ready = now
        else:
            if self._idle:
                self._idle.pop()
            ready = now + self._seconds.weight_load
        for seconds, number in share:
            rollout.ends[number] = max(ready + seconds, rollout.ends.get(number, 0.0))
            rollout.unfinished[number] -= 1
            if not rollout.unfinished[number]:
                self._announce(rollout.ends[number], "complete", rollout.number, (number,))
        end = ready + share[-1][0]
        self._work.decoding.append((ready, end))
        self._work.generation.append((now, end))
        self._announce(end, "actor", rollout.number)

    def _generates(self, name: int, order: int, now: float) -> None:
        rollout = self._rollouts[name]
        rollout.generating -= 1
        self._parts[rollout.number].left -= 1
        self._parts[rollout.number].at_work -= 1
        self._idle.append(rollout.version)
        self._forget(rollout)

    def _is_over(self, rollout: Rollout) -> None:
        self._generators.end(self._parts.pop(rollout.number))

    def _version_is_there(self, now: float) -> None:
        """Do nothing: an actor keeps the weights that its rollout began with."""

    def _closes(self, now: float) -> None:
        """Do nothing: the work of an actor was counted when it began."""
