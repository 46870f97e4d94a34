"""The splits of an asynchronous job's instances, made as live jobs make them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.lengths import LengthPredictor
from rlhfless_operator.planner.step.async_planning import PUBLISHING, Asynchrony, lag_of_pieces
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.generation import (
    ExpectedGroup,
    ExpectedSamples,
    StepSetting,
    split_samples,
)
from rlhfless_operator.planner.step.planning import Limits
from rlhfless_operator.planner.step.rates import RateSplit
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import Group
from rlhfless_operator.simulator.scenarios import Scenario


@dataclass(frozen=True)
class LivePlan:
    """The actors of a rollout, and the order of its groups."""

    actors: int
    places: int
    """Most samples in the batch of each actor."""
    sequences: int
    """The same, however long they are."""
    samples: int
    """Samples in it on average."""
    order: Sequence[Group]
    """Groups, those with the longest expected responses first."""
    preparers: int = 1


class LivePlans:
    """The splits by the rates of the stages, by the lengths of earlier steps.

    Args:
        system: its staleness limits how far rollouts go ahead.
        split: its instances are the most of a plan.
        history: times of learning.
        swap_seconds: seconds for which an actor stands still for newer weights.
        in_pieces: whether the learner begins with the first groups of a step.
    """

    def __init__(
        self,
        scenario: Scenario,
        system: Rollouts,
        split: Split,
        history: History,
        swap_seconds: float = 0.0,
        *,
        in_pieces: bool = False,
    ) -> None:
        longest = scenario.lengths.longest
        self._scenario, self._system, self._split, self._history = scenario, system, split, history
        self._profile = scenario.profile()
        self._swap_seconds = swap_seconds
        self._in_pieces = in_pieces
        self._actors: int | None = None
        """Number of actors of the plan before."""
        self._predictor = LengthPredictor(default_tokens=longest / 2, longest=longest)

    def plan(self, groups: Sequence[Group]) -> LivePlan:
        """Return the plan of the next rollout."""
        split, longest = self._split_of(groups), self._scenario.lengths.longest
        self._actors = split.actors
        order = sorted(
            groups, key=lambda group: -self._predictor.predict(group.prompt, group.prompt_tokens).outlook(0, longest)[0]
        )
        batch = math.ceil(split.batch)
        return LivePlan(split.actors, split.places, split.sequences, batch, order, split.preparers.instances)

    def _split_of(self, groups: Sequence[Group]) -> RateSplit:
        profile, split = self._profile, self._split
        samples = ExpectedSamples.of(
            (
                ExpectedGroup(
                    group.number,
                    group.prompt_tokens,
                    len(group.lengths),
                    self._predictor.predict(group.prompt, group.prompt_tokens),
                )
                for group in groups
            ),
            self._scenario.lengths.longest,
        )
        setting = StepSetting(
            profile,
            Limits(1, split.instances, profile.kv_tokens, split.sequences),
            self._training(),
            cost_weight=self._scenario.cost_weight,
            learning_seconds=self._history.mean("learning"),
            asynchrony=Asynchrony(
                self._system.max_staleness,
                self._swap_seconds,
                self._system.new_weights == "switch" and self._system.recomputes,
                self._actors,
                self._lag(),
                self._history.mean(PUBLISHING),
            ),
        )
        return split_samples(samples, setting)

    def _lag(self) -> float | None:
        learning, training = self._history.mean("learning"), self._history.mean("learning/train")
        return lag_of_pieces(learning, training) if self._in_pieces else None

    def _training(self) -> Training:
        profile, split = self._profile, self._split
        # The time to prepare a token is known once a step has been prepared.
        known = bool(self._history.recent("rollout"))
        return Training(
            gpus=1,
            token_gpu_seconds=self._scenario.preparation_gpu_seconds(1.0) / profile.gpus if known else 0.0,
            start_seconds=0.0,
            update_seconds=0.0,
            learning_price=split.learner_gpus / profile.gpus,
            preparers=(1, split.preparers) if split.preparers > 1 else (1,),
            afterwards_seconds=self._history.mean("learning"),
        )

    def observe(self, groups: Sequence[Group]) -> None:
        """Record that a step's groups are complete."""
        for group in groups:
            self._predictor.observe(group.prompt, group.lengths, group.prompt_tokens)
