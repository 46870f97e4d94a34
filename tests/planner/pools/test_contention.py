"""Plans that know that other jobs want the GPUs."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.pools.contention import ALONE, Contention, Demand, contention
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits
from rlhfless_operator.planner.step.whole_step import plan_step

PROFILE = InstanceProfile(LinearLatency(0.010, 2e-5, 5e-8, 3e-5), 1, 10**6, 0.0, 0.0)
SAMPLES = [SampleLoad(prompt, index, 100, 100 + 15 * prompt) for prompt in range(40) for index in range(4)]


def demand(gpus: int, *, since: float = 0.0) -> Demand:
    made = Demand(since)
    made.change(gpus, since)
    return made


def test_a_job_that_is_alone_plans_by_its_own_weight_on_all_gpus() -> None:
    assert contention([], 8, 1, 100.0) == ALONE
    assert ALONE.cost_weight(0.3) == 0.3
    assert ALONE.actors is None


def test_what_others_want_is_weighed_as_gpu_seconds() -> None:
    assert Contention(0.5).cost_weight(0.5) == 0.75
    assert Contention(1.0).cost_weight(0.0) == 1.0


def test_jobs_that_begin_together_each_count_on_their_fair_part() -> None:
    assert contention([Demand(0.0)], 8, 1, 0.0) == Contention(0.5, 4)
    assert contention([Demand(0.0) for _ in range(3)], 8, 1, 0.0) == Contention(0.75, 2)
    assert contention([Demand(0.0) for _ in range(3)], 8, 4, 0.0).actors == 1, "one actor there always is"
    assert contention([Demand(0.0)], 8, 0, 0.0).actors is None, "actors without GPUs are in nobody's way"


def test_what_another_job_does_soon_counts_more_than_what_was_assumed() -> None:
    idle, greedy = Demand(0.0), demand(8)
    assert contention([idle], 8, 1, 3600.0).wanted < 0.01
    assert contention([idle], 8, 1, 3600.0).actors == 8
    assert contention([greedy], 8, 1, 3600.0) == Contention(pytest.approx(1.0, abs=0.01), 4)


def test_what_is_long_ago_counts_less() -> None:
    was_busy = demand(8)
    was_busy.change(-8, 1000.0)
    assert was_busy.mean(0.0, 1000.0) > 7.5
    assert was_busy.mean(0.0, 1600.0) < 5
    assert was_busy.mean(0.0, 10_000.0) < 0.1


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 16), st.integers(1, 4), st.floats(0, 1e4))
def test_a_job_can_always_count_on_its_fair_part(wanted: list[int], gpus: int, per_actor: int, now: float) -> None:
    left = contention([demand(each) for each in wanted], gpus, per_actor, now)
    assert 0.0 <= left.wanted <= 1.0
    assert left.actors is not None
    assert 1 <= left.actors <= max(1, round(gpus / per_actor))
    assert left.actors >= round(gpus / (len(wanted) + 1) / per_actor)
    assert 0.5 <= left.cost_weight(0.5) <= 1.0


@given(st.integers(0, 8), st.integers(0, 8), st.floats(1, 1e4))
def test_the_more_others_want_the_less_a_job_counts_on(few: int, more: int, now: float) -> None:
    few, more = sorted((few, more))
    less, left = contention([demand(more)], 8, 1, now), contention([demand(few)], 8, 1, now)
    assert less.wanted >= left.wanted
    assert less.actors is not None
    assert left.actors is not None
    assert less.actors <= left.actors


@dataclass
class Job:
    """A job that plans each step by what the others leave, and then works through it."""

    demand: Demand
    actors: list[int] = field(default_factory=list)

    def step(self, others: list["Job"], gpus: int, now: float) -> float:
        left = contention([each.demand for each in others], gpus, 1, now)
        made = plan_step(
            SAMPLES,
            PROFILE,
            Limits(1, gpus if left.actors is None else min(gpus, left.actors)),
            Training(1, 1e-5, 0.0, 0.0, preparers=(1,), afterwards_seconds=5.0),
            cost_weight=left.cost_weight(0.2),
            ready_seconds=0.0,
        )
        self.actors.append(len(made.generation.shares))
        for share in made.generation.shares:
            # Where all GPUs are in use a task waits, and is wanted for longer.
            crowd = max(1.0, sum(each.actors[-1] for each in [self, *others] if each.actors) / gpus)
            self.demand.change(1, now)
            self.demand.change(-1, now + share.expected_seconds * crowd)
        return now + made.expected_seconds


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(count=st.integers(2, 4), gpus=st.sampled_from([4, 8]))
def test_jobs_that_plan_by_each_other_settle_and_take_all_gpus_when_the_others_end(count: int, gpus: int) -> None:
    """None of: all back off, all take everything, and back again."""
    alone = Job(Demand(0.0))
    alone.step([], gpus, 0.0)
    jobs, now = [Job(Demand(0.0)) for _ in range(count)], 0.0
    for _ in range(20):
        now = max(job.step([each for each in jobs if each is not job], gpus, now) for job in jobs)
    for job in jobs:
        late = job.actors[-8:]
        assert max(late) - min(late) <= 1
        assert max(late) <= alone.actors[0]
    assert max(job.actors[-1] for job in jobs) - min(job.actors[-1] for job in jobs) <= 1
    jobs[0].step([], gpus, now)
    assert jobs[0].actors[-1] == alone.actors[0]
