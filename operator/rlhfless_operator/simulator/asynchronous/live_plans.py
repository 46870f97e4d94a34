"""The plans of an asynchronous job's steps, made as live jobs make them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.lengths import LengthPredictor
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.generation import (
    ExpectedGroup,
    ExpectedSamples,
    PlannedStep,
    StepSetting,
    plan_generation,
)
from rlhfless_operator.planner.step.planning import Limits, Share, longest_first
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import Group, ShareEnds, StepShares, share_ends
from rlhfless_operator.simulator.scenarios import Scenario


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


@dataclass(frozen=True)
class LivePlan:
    """The actors of a rollout, and the order of its groups."""

    actors: int
    places: int
    """Samples in the batch of each actor."""
    order: Sequence[Group]
    """Groups, those with the longest expected responses first."""
    preparers: int = 1


class LivePlans:
    """The plans of the `cost` policy, by the lengths of earlier steps.

    Args:
        system: its staleness limits how far rollouts go ahead.
        split: its instances are the most of a plan.
        history: times of learning.
    """

    def __init__(self, scenario: Scenario, system: Rollouts, split: Split, history: History) -> None:
        longest = scenario.lengths.longest
        self._scenario, self._system, self._split, self._history = scenario, system, split, history
        self._profile = scenario.profile()
        self._predictor = LengthPredictor(default_tokens=longest / 2, longest=longest)

    def plan(self, groups: Sequence[Group]) -> StepShares:
        """Return the plan of the next step."""
        made, profile = self._made(groups), self._profile
        return StepShares(
            ends_of_shares(made.generation.shares, groups, profile, self._split.sequences), made.preparers
        )

    def plan_batches(self, groups: Sequence[Group]) -> LivePlan:
        """Return the plan of the next rollout, if its groups join live batches."""
        made, longest = self._made(groups), self._scenario.lengths.longest
        shares = made.generation.shares
        places = math.ceil(sum(len(share.samples) for share in shares) / len(shares))
        order = sorted(
            groups, key=lambda group: -self._predictor.predict(group.prompt, group.prompt_tokens).outlook(0, longest)[0]
        )
        return LivePlan(len(shares), places, order, made.preparers)

    def _made(self, groups: Sequence[Group]) -> PlannedStep:
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
            max_staleness=self._system.max_staleness,
        )
        return plan_generation("cost", samples, setting)

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
