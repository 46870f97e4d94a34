"""Plans of a job's steps. The next one is made while the learner works."""

from collections.abc import Callable, Sequence

from rlhfless_functions.api import Purpose
from rlhfless_operator.planner.step.holding import StagesHolding
from rlhfless_operator.planner.step.learner_scaling import LearnerOption
from rlhfless_operator.training.costs.cost_model import CostModel
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.data.prompts import Prompts
from rlhfless_operator.training.instances.gang import GangSize


class StepPlans:
    """Plans a job's generation from the newest state of the cost model.

    Args:
        cost_model: of the job.
        prompts: of the job.
        follows: whether learning may begin before a training batch is complete.
        gang: the learning instances, of which a plan counts as many as learn now if it has no choice.
        holding: returns the costs of keeping all instances for a whole step; None if they can't be kept.
    """

    def __init__(
        self,
        cost_model: CostModel,
        prompts: Prompts,
        *,
        follows: bool,
        gang: GangSize,
        holding: Callable[[], StagesHolding | None] = lambda: None,
    ) -> None:
        self._cost_model = cost_model
        self._prompts = prompts
        self._follows = follows
        self._gang = gang
        self._holding = holding
        self.learners: Sequence[LearnerOption] = ()
        """Numbers of learning instances from which the next training step's plan chooses."""
        self._ahead: tuple[list[int], GenerationPlan] | None = None

    @property
    def planned_ahead(self) -> float | None:
        """Instance-seconds of the plan that was made ahead, where there is one."""
        return None if self._ahead is None else self._ahead[1].planned.generation.expected_instance_seconds

    def plan(self, prompts: Sequence[int], samples_per_prompt: int, purpose: Purpose) -> GenerationPlan:
        """Return the plan for these prompts: the one that was made ahead, if it is theirs and up to date."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and purpose == "training" and ahead[0] == prompts and not self._is_outdated(ahead[1]):
            return ahead[1]
        training = purpose == "training"
        return self._cost_model.plan(
            prompts,
            samples_per_prompt,
            self._prompts.tokens(purpose),
            known=training,
            follows=training and self._follows,
            learners=self.learners if training else (),
            learning_instances=self._gang.now if training else 1,
            holding=self._holding() if training else None,
        )

    def plan_ahead(self, prompts: list[int], samples_per_prompt: int) -> GenerationPlan:
        """Plan the next training step, and keep the plan until it is asked for."""
        plan = self.plan(prompts, samples_per_prompt, "training")
        self._ahead = prompts, plan
        return plan

    def _is_outdated(self, plan: GenerationPlan) -> bool:
        """Whether it was made while the first step was learnt. Then nothing was known of learning, and a learner could
        not have followed it."""
        return self._follows and plan.planned.groups is None and self._cost_model.knows_learning
