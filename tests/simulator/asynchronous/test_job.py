"""Ours, simulated: beside the code that jobs use, and what the live loop promises of staleness and of groups."""

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.asynchronous.overlapped_rollouts import EmulatedClock, Job
from rlhfless_operator.planner.groups.group_buffer import TooStale
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.step.async_planning import PUBLISHING
from rlhfless_operator.simulator.asynchronous.job import StageSeconds, Work
from rlhfless_operator.simulator.asynchronous.shares_job import SharesJob
from rlhfless_operator.simulator.asynchronous.systems import SYSTEMS, Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import Group, ShareEnds, StepShares
from rlhfless_operator.simulator.scenarios import Scenario
from tests.simulator.asynchronous.small_runs import ROLLOUTS, SCENARIOS, run, split_of
from tests.simulator.small_scenario import SMALL

SPLITS = st.tuples(st.integers(1, 6), st.sampled_from((4, 16, 256)), st.integers(0, 3))
SEEDS = st.integers(0, 50)


@given(SCENARIOS, ROLLOUTS, SPLITS, SEEDS)
@settings(max_examples=100, deadline=None)
def test_no_group_is_lost_or_learnt_from_twice_or_too_stale(
    scenario: Scenario, system: Rollouts, split: tuple[int, int, int], seed: int
) -> None:
    steps = 6
    outcome = run(scenario, system, split_of(scenario, *split), seed, steps)
    learnt = [group.number for step in outcome.steps for group in step.groups]
    left = [group.number for group, _ in outcome.left]
    assert [len(step.groups) for step in outcome.steps] == [scenario.prompts_per_step] * steps
    # Whole rollouts begin, and what they drew is learnt from or waits.
    assert sorted(learnt + left) == list(range(len(learnt + left)))
    assert min(outcome.staleness) >= 0
    if system.too_stale != "downweight":
        assert max(outcome.staleness) <= system.max_staleness
    if system.too_stale == "wait":
        assert all(version + 1 + system.max_staleness > steps for _, version in outcome.left)
    assert len(left) <= scenario.prompts_per_step * (system.max_staleness + 1)
    assert system.too_stale == "drop" or outcome.dropped == 0
    assert all(first.end < second.end for first, second in zip(outcome.steps, outcome.steps[1:], strict=False))


@given(SCENARIOS, ROLLOUTS, SPLITS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_work_is_conserved_and_no_gpu_is_held_twice(
    scenario: Scenario, system: Rollouts, split: tuple[int, int, int], seed: int
) -> None:
    gpus = split_of(scenario, *split)
    outcome = run(scenario, system, gpus, seed)
    tokens = sum(group.tokens for step in outcome.steps for group in step.groups)
    learning = scenario.learning_gpu_seconds(tokens)
    preparation = scenario.preparation_gpu_seconds(tokens)
    # Nothing but the publication of the weights is left out. The next step may be under way.
    updates = len(outcome.steps) * (scenario.update_seconds - scenario.publishing_seconds) * gpus.learner_gpus
    assert outcome.learner_busy >= (learning + updates + (0 if gpus.preparers else preparation)) * (1 - 1e-9)
    assert outcome.learner_busy <= outcome.seconds * gpus.learner_gpus * (1 + 1e-9)
    assert outcome.learner_busy <= outcome.learner_held * (1 + 1e-9)
    assert outcome.preparer_held >= (preparation * (1 - 1e-9) if gpus.preparers else 0)
    assert 0 < outcome.generation_busy <= outcome.generation_held * (1 + 1e-9)
    # At most the split is held for the whole run.
    assert outcome.generation_held <= gpus.instances * outcome.seconds + 1e-6
    assert outcome.preparer_held <= gpus.preparers * outcome.seconds + 1e-6


class TheseShares:
    """Rollouts that are divided beforehand."""

    def __init__(self, rollouts: Sequence[Sequence[ShareEnds]], preparers: int = 1) -> None:
        self._rollouts, self._preparers = iter(rollouts), preparers
        self.observed: list[list[int]] = []

    def plan(self, groups: Sequence[Group]) -> StepShares:
        return StepShares(next(self._rollouts), self._preparers)

    def observe(self, groups: Sequence[Group]) -> None:
        self.observed.append([group.number for group in groups])


def simulated(
    rollouts: Sequence[Sequence[ShareEnds]],
    steps: int,
    seconds: StageSeconds,
    most: int,
    *,
    preparers: int = 1,
    too_stale: TooStale = "wait",
    history: History | None = None,
) -> Work:
    """Steps over these rollouts, whose groups have a token each."""
    numbers = [Counter(number for share in shares for _, number in share) for shares in rollouts]
    batches = [[Group(number, 0, 0, (1,) * count) for number, count in sorted(each.items())] for each in numbers]
    plans = TheseShares(rollouts, preparers)
    system = Rollouts("any", "any", most, too_stale)
    job = SharesJob(system, len(batches[0]), seconds, plans, history or History(), iter(batches))
    return job.until(steps)


@st.composite
def own_seconds(draw: st.DrawFn, least: float, most: float, name: object) -> float:
    """A time with a fraction of its own, whose sums with other times are never equal: what happens first at one instant
    is up to the event loop."""
    return draw(st.floats(least, most)) + 1e-3 * random.Random(str(name)).random()


@st.composite
def divided(draw: st.DrawFn, rollouts: int, groups: int) -> list[list[ShareEnds]]:
    """So many rollouts, on one to four actors each. No two of them have anything end at the same time."""
    found = []
    for rollout in range(rollouts):
        actors = draw(st.integers(1, min(4, groups)))
        shares: list[list[tuple[float, int]]] = [[] for _ in range(actors)]
        for group in range(groups):
            number = rollout * groups + group
            shares[group % actors].append((draw(own_seconds(0.5, 40, number)), number))
        found.append([sorted(share) for share in shares])
    return found


@given(
    st.data(),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 3),
    own_seconds(0.01, 30, "learning"),
    own_seconds(0.001, 6, "preparation"),
)
@settings(max_examples=60, deadline=None)
def test_steps_take_the_groups_that_jobs_take_and_end_when_theirs_do(
    data: st.DataObject, groups: int, most: int, preparers: int, learning: float, preparation: float
) -> None:
    """Beside a job on an emulated clock, in which everything is decided by the code that jobs use."""
    steps = 5
    rollouts = data.draw(divided(steps + most + 2, groups))
    job = Job(rollouts, learning, most, steps=steps, preparation=preparation, preparers=preparers)
    with asyncio.Runner(loop_factory=EmulatedClock) as runner:
        runner.run(job.run())
        end = runner.get_loop().time()
    stages = StageSeconds(0.0, preparation, 0.0, learning)
    work = simulated(rollouts, steps, stages, most, preparers=preparers)
    assert work.steps[-1].end == pytest.approx(end, rel=1e-6)
    taken = [[each.group.name.prompt for each in chosen] for chosen in job.taken]
    assert [[group.number for group in step.groups] for step in work.steps] == taken
    versions = [[each.group.version for each in chosen] for chosen in job.taken]
    assert [list(step.versions) for step in work.steps] == versions


def one_actor(*ends: float, rollouts: int = 8) -> list[list[ShareEnds]]:
    """Rollouts of one actor, with a group for each of these ends."""
    return [
        [[(seconds, rollout * len(ends) + place) for place, seconds in enumerate(ends)]] for rollout in range(rollouts)
    ]


def test_a_learner_is_held_up_by_the_copy_and_not_by_the_publication() -> None:
    quick = one_actor(1.0)
    held_up = simulated(quick, 4, StageSeconds(0.0, 0.0, 0.0, update=5.0), most=3)
    beside = simulated(quick, 4, StageSeconds(0.0, 0.0, 0.0, update=3.0, publishing=2.0), most=3)
    assert [step.end for step in held_up.steps] == [6.0, 11.0, 16.0, 21.0]
    assert [begin for begin, _ in beside.learning][:4] == [1.0, 4.0, 7.0, 10.0]
    assert [step.end for step in beside.steps] == [6.0, 9.0, 12.0, 15.0]


def test_a_plan_hears_of_learning_without_the_publication_beside_the_next_step() -> None:
    history = History()
    seconds = StageSeconds(0.0, 0.0, 0.0, update=3.0, publishing=2.0)
    simulated(one_actor(1.0), 4, seconds, most=3, history=history)
    assert set(history.recent("learning")) == {3.0}
    assert set(history.recent(PUBLISHING)) == {2.0}


def test_one_version_is_published_at_a_time() -> None:
    work = simulated(one_actor(1.0), 4, StageSeconds(0.0, 0.0, 0.0, update=1.0, publishing=4.0), most=3)
    # The first is published from 2 to 6. So the second, which is learnt at 3, is published from 6 on.
    assert [step.end for step in work.steps] == [6.0, 10.0, 14.0, 18.0]
    assert [begin for begin, _ in work.learning][:4] == [1.0, 2.0, 6.0, 10.0]


def test_versions_that_are_on_their_way_begin_no_rollout() -> None:
    work = simulated(one_actor(1.0), 6, StageSeconds(0.0, 0.0, 0.0, update=1.0, publishing=50.0), most=1)
    # The third rollout waits for the first version to be there, at 52.
    assert work.steps[2].versions == (1,)
    assert work.learning[2][0] == pytest.approx(53.0)


@pytest.mark.parametrize(("rule", "waits"), [("wait", True), ("downweight", False), ("drop", False)])
def test_a_group_that_takes_long_holds_up_only_those_who_wait_for_it(rule: TooStale, waits: bool) -> None:
    # Two actors. The long response has one of its own.
    rollouts = [[[share[-1]], share[:-1]] for (share,) in one_actor(1.0, 1.0, 1.0, 1.0)]
    rollouts[0][0] = [(60.0, 3)]
    work = simulated(rollouts, 2, StageSeconds(0.0, 0.0, 0.0, update=2.0), most=1, too_stale=rule)
    assert (work.steps[-1].end > 60.0) == waits


def test_steps_of_a_synchronous_length_wait_for_the_one_preparer() -> None:
    slow = dataclasses.replace(SMALL, preparation_utilisation=1e-3)
    split = Split(2, 1, 256, preparers=1)
    own = run(slow, SYSTEMS["rlhfless-async-2"], split, seed=0, steps=6)
    tokens = sum(group.tokens for step in own.steps for group in step.groups)
    assert own.seconds >= slow.preparation_gpu_seconds(tokens)
    assert own.preparer_held == pytest.approx(slow.preparation_gpu_seconds(tokens), rel=0.2)


def test_a_run_is_the_same_again() -> None:
    found = [run(SMALL, SYSTEMS["rlhfless-async-1"], Split(2, 1, 256), seed=0) for _ in range(2)]
    assert found[0] == found[1]
