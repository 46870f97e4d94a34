"""Groups that teach nothing are replaced while their rollout goes on."""

from types import SimpleNamespace
from typing import Any

from rlhfless_functions.api import GroupResult, PrepareResult, SampleTask
from rlhfless_operator.planner.groups.dynamic_sampling import SamplingRounds
from rlhfless_operator.planner.lengths import LengthEstimate
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.data.cursor import DataCursor
from rlhfless_operator.training.stages.replacing import Replacing
from tests.training.stages.test_rollout_watch import GROUPS, Rollout


def plan_of(prompts: list[int]) -> GenerationPlan:
    shares = [[SampleTask(prompt=prompt, index=index) for prompt in prompts for index in range(2)]]
    planned: Any = SimpleNamespace()
    return GenerationPlan(planned, shares, {prompt: LengthEstimate(100.0, 0.0, 1) for prompt in prompts})


def replacing_of(before: dict[int, GroupResult]) -> tuple[Replacing, SimpleNamespace]:
    """A rollout of four groups of two samples, and its job."""
    run = SimpleNamespace(
        prompts=SimpleNamespace(cursor=DataCursor(20, 0, shuffle=False)),
        plans=SimpleNamespace(plan=lambda prompts, samples, purpose: plan_of(prompts)),
        progress=SimpleNamespace(samples=8),
        spec=SimpleNamespace(batch=SimpleNamespace(samples_per_prompt=2), tracking=SimpleNamespace(sample_groups=1)),
    )
    rounds = SamplingRounds(4, 2, 20)
    rounds.draw(run.prompts.cursor.draw(rounds.count))
    return Replacing(run, rounds, plan_of(rounds.drawn), before), run  # type: ignore[arg-type]


def group(prompt: int, spread: float) -> GroupResult:
    return GroupResult(prompt=prompt, reward=0.5, spread=spread)


def chunk(*groups: GroupResult) -> PrepareResult:
    return PrepareResult(part="p", groups=list(groups), metrics={})


async def test_each_chunk_has_fresh_prompts_drawn_and_planned_for_what_taught_nothing() -> None:
    replacing, run = replacing_of({})
    replacing.prepared(chunk(group(0, 0.0), group(3, 1.0)))
    assert replacing.rounds.drawn == [0, 1, 2, 3, 4]
    replacing.prepared(chunk(group(1, 0.0), group(2, 0.0)))
    assert replacing.rounds.drawn == [0, 1, 2, 3, 4, 5, 6]
    assert run.progress.samples == 14
    assert replacing.may_go_on()
    replacing.prepared(chunk(group(4, 1.0), group(5, 1.0), group(6, 1.0)))
    assert not replacing.may_go_on()
    arrived = [[sample.prompt for sample in plan.shares[0]] async for plan in replacing.arrivals()]
    assert arrived == [[4, 4], [5, 5, 6, 6]]
    assert sorted(replacing.plan.estimates) == [0, 1, 2, 3, 4, 5, 6], "the plan has grown"
    assert {sample.prompt for sample in replacing.examples} == {0, 4, 5}, "the first of those that were drawn together"
    assert replacing.rounds.chosen == [3, 4, 5, 6]


async def test_a_later_driver_knows_at_once_what_an_earlier_one_had_prepared() -> None:
    before = {prompt: group(prompt, 0.0 if prompt in (0, 4) else 1.0) for prompt in range(5)}
    replacing, _ = replacing_of(before)
    assert replacing.rounds.drawn == [0, 1, 2, 3, 4, 5]
    replacing.prepared(chunk(group(5, 1.0)))
    assert [[sample.prompt for sample in plan.shares[0]] async for plan in replacing.arrivals()] == [[4, 4], [5, 5]]


async def test_fresh_prompts_are_foreseen_as_the_others_are() -> None:
    rollout = Rollout({"environment/token": 0.1})
    rollout.begins()
    await rollout.watch.all_is_generated()
    assert rollout.watch._generation_seconds() == 0.0
    rollout.estimates[GROUPS] = LengthEstimate(100.0, 0.0, 1)
    rollout.remaining[GROUPS] = 100.0
    rollout.migration.assigned("actor", {(GROUPS, 0): 0})
    rollout.watch.more_is_generated()
    assert rollout.watch._generation_seconds() > 0.0
    assert rollout.watch._away()[GROUPS] > 0.0
