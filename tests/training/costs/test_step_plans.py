"""The plan of the next step is made ahead, and used where it is that step's."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_operator.job.instance_ranges import LearnerRange
from rlhfless_operator.training.costs.step_plans import StepPlans
from rlhfless_operator.training.instances.gang import GangSize


class Recorded:
    """A cost model whose plans are the questions that it was asked."""

    def plan(self, prompts: Sequence[int], samples: int, tokens: Sequence[int], **asked: Any) -> tuple[Any, ...]:
        return tuple(prompts), samples, tuple(tokens), asked["known"], asked["follows"], asked["learning_instances"]


def gang_of(count: int) -> GangSize:
    return GangSize(LearnerRange(min=1, max=count))


@pytest.fixture
def plans() -> Callable[..., StepPlans]:
    def make(*, follows: bool = False) -> StepPlans:
        prompts = SimpleNamespace(tokens=lambda purpose: [1] if purpose == "training" else [2])
        return StepPlans(Recorded(), prompts, follows=follows, gang=gang_of(4))  # type: ignore[arg-type]

    return make


def test_a_plan_that_was_made_ahead_is_used_once(plans: Callable[..., StepPlans]) -> None:
    made = plans()
    ahead = made.plan_ahead([3, 4], 8)
    assert made.plan([3, 4], 8, "training") is ahead
    assert made.plan([3, 4], 8, "training") is not ahead


@pytest.mark.parametrize(("prompts", "purpose"), [([4, 3], "training"), ([3, 4], "evaluation")])
def test_a_plan_of_something_else_is_made_anew(
    plans: Callable[..., StepPlans], prompts: list[int], purpose: Any
) -> None:
    made = plans()
    made.plan_ahead([3, 4], 8)
    assert made.plan(prompts, 8, purpose)[0] == tuple(prompts)  # type: ignore[index]


@pytest.mark.parametrize("knows", [False, True])
def test_a_plan_that_knew_nothing_of_learning_is_made_anew_once_something_is_known(knows: bool) -> None:
    """It is made while the first step is learnt, and the second step's learner is to follow its groups already."""

    class Learning:
        knows_learning = False

        def plan(self, *asked: Any, **more: Any) -> Any:
            return SimpleNamespace(planned=SimpleNamespace(groups={} if self.knows_learning else None))

    cost_model = Learning()
    prompts: Any = SimpleNamespace(tokens=lambda purpose: [1])
    made = StepPlans(cost_model, prompts, follows=True, gang=gang_of(1))  # type: ignore[arg-type]
    ahead = made.plan_ahead([3], 8)
    cost_model.knows_learning = knows
    assert (made.plan([3], 8, "training") is ahead) is not knows
    ahead = made.plan_ahead([4], 8)
    assert made.plan([4], 8, "training") is ahead


def test_only_training_knows_its_prompts_and_learners_and_lets_one_follow(plans: Callable[..., StepPlans]) -> None:
    made = plans(follows=True)
    assert made.plan([0], 2, "training") == ((0,), 2, (1,), True, True, 4)
    assert made.plan([0], 2, "evaluation") == ((0,), 2, (2,), False, False, 1)
    assert plans().plan([0], 2, "training") == ((0,), 2, (1,), True, False, 4)
