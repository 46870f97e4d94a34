"""The prefixes that the actors of a plan could share, and the choice of whether they do."""

from rlhfless_functions import artifacts
from rlhfless_functions.api import Purpose
from rlhfless_operator.training.costs.cost_model import startup
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.costs.prefix_sharing import PrefixSharing
from rlhfless_operator.training.run import TrainingRun


def could_share(run: TrainingRun, purpose: Purpose, plan: GenerationPlan) -> PrefixSharing | None:
    """Return the prefixes that a plan's actors could share; None if no two prompts begin alike."""
    tree = run.prompts.prefix_tree(purpose)
    if tree is None:
        return None
    in_store = artifacts.local_path(run.folder.root) is None
    return run.cost_model.share_prefixes(tree, plan.shares, run.prompts.tokens(purpose), in_store=in_store)


def consider_prefixes(run: TrainingRun, step: int, plan: GenerationPlan) -> None:
    """Choose whether the instances of a training step can share prefixes, before they are requested."""
    if run.prefixes.is_settled(step):
        return
    actors = len(plan.shares)
    note = run.prefixes.consider(
        step,
        could_share(run, "training", plan),
        generation_seconds=actors * plan.planned.expected_generation_seconds,
        steps_left=run.prompts.total_steps - step + 1,
        restart=actors * run.cost_model.history.mean(startup("generation")),
    )
    if note is not None:
        run.progress.note(note)
