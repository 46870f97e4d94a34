"""Plans of the steps of an asynchronous job, made as `training/costs/generation_plan.py` makes them."""

import math
from collections.abc import Iterable, Sequence

from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.lengths import LengthPredictor
from rlhfless_operator.planner.step.async_planning import plan_asynchronous_step
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, Share
from rlhfless_operator.planner.step.whole_step import StepPlan, plan_step
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import Group, ShareEnds, StepShares, share_ends
from rlhfless_operator.simulator.scenarios import Scenario


def ends_of_shares(
    shares: Iterable[Share], groups: Iterable[Group], profile: InstanceProfile, sequences: int
) -> list[ShareEnds]:
    """When the responses of a plan end, in the order in which its actors are given instances.

    Args:
        shares: whose prompts are the numbers of groups.
        sequences: most that an instance decodes at a time.
    """
    responses = {response.key: response for group in groups for response in group.responses()}
    ordered = sorted(shares, key=lambda share: -share.expected_seconds)
    return [
        share_ends((responses[sample.prompt, sample.index] for sample in share.samples), profile, sequences)
        for share in ordered
    ]


class LivePlans:
    """The `cost` policy, on lengths that earlier steps had.

    Args:
        system: its staleness bounds how far rollouts go ahead.
        split: its instances are the most that a plan has.
        history: what learning took.
    """

    def __init__(self, scenario: Scenario, system: Rollouts, split: Split, history: History) -> None:
        longest = scenario.lengths.longest
        self._scenario, self._system, self._split, self._history = scenario, system, split, history
        self._profile = scenario.profile()
        self._predictor = LengthPredictor(default_tokens=longest / 2, longest=longest)

    def plan(self, groups: Sequence[Group]) -> StepShares:
        """The plan of the next step."""
        scenario, profile, history = self._scenario, self._profile, self._history
        longest = scenario.lengths.longest
        estimates = {group.number: self._predictor.predict(group.prompt) for group in groups}
        loads = [
            SampleLoad(group.number, index, group.prompt_tokens, tokens)
            for group in groups
            for index, tokens in enumerate(estimates[group.number].group(len(group.lengths), longest))
        ]
        runaways = {number: estimate.runaways for number, estimate in estimates.items()}
        # What preparing a token takes is known once a step has been prepared.
        known = bool(history.recent("rollout"))

        def plan_with(training: Training) -> StepPlan:
            return plan_step(
                loads,
                profile,
                Limits(1, self._split.instances, profile.kv_tokens, self._split.sequences),
                training,
                cost_weight=scenario.cost_weight,
                ready_seconds=profile.weight_load_seconds,
                tail_tokens=longest if sum(runaways.values()) > 0 else 0.0,
                runaways=runaways,
            )

        ahead = plan_asynchronous_step(
            plan_with,
            Training(
                gpus=1,
                token_gpu_seconds=scenario.preparation_gpu_seconds(1.0) / profile.gpus if known else 0.0,
                start_seconds=0.0,
                update_seconds=0.0,
                learning_price=self._split.learner_gpus / profile.gpus,
                preparers=(1, self._split.preparers) if self._split.preparers > 1 else (1,),
                afterwards_seconds=history.mean("learning"),
            ),
            tokens=math.fsum(load.prompt_tokens + load.expected_tokens for load in loads),
            startup_seconds=profile.startup_seconds,
            learning_seconds=history.mean("learning"),
            max_staleness=self._system.max_staleness,
        )
        return StepShares(
            ends_of_shares(ahead.step.generation.shares, groups, profile, self._split.sequences),
            ahead.preparers.instances,
        )

    def observe(self, groups: Sequence[Group]) -> None:
        """A step's groups are complete."""
        for group in groups:
            self._predictor.observe(group.prompt, group.lengths)
