"""Splits by rates: within every limit, steady, and no worse than any other split of the same instances."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.step.async_planning import lag_of_pieces
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.rates import (
    STAYS,
    Actors,
    Learner,
    Preparers,
    RateSplit,
    StepWork,
    split_by_rates,
)

LATENCY = LinearLatency(0.006, 6e-6, 1.6e-8, 2e-5)
WORK = StepWork.of(
    [SampleLoad(prompt, index, 200, 500.0 + 900 * index + 20 * prompt) for prompt in range(64) for index in range(8)]
)
ACTORS = Actors(LATENCY, 1, 24, 256, 1_000_000)

WORKS = st.builds(
    lambda prompts, samples, tokens, spread: StepWork.of(
        [
            SampleLoad(prompt, index, 100, tokens * (1 + spread * index))
            for prompt in range(prompts)
            for index in range(samples)
        ]
    ),
    st.integers(1, 24),
    st.integers(1, 8),
    st.floats(1, 4000),
    st.floats(0, 3),
)
LEARNERS = st.builds(
    lambda instances, seconds, price, publishing: Learner(instances, seconds, price, publishing=publishing),
    st.integers(1, 16),
    st.floats(0, 500),
    st.floats(0.2, 4),
    st.floats(0, 500),
)
PREPARERS = st.builds(
    lambda work, least, more, price: Preparers(work, least, least + more, price),
    st.floats(0, 500),
    st.integers(1, 3),
    st.integers(0, 4),
    st.floats(0.2, 2),
)


def split(
    learning: float = 60.0, *, weight: float = 0.5, ahead: int = 1, now: int | None = None, work: StepWork = WORK
) -> RateSplit:
    return split_by_rates(
        work, ACTORS, Learner(12, learning), Preparers(), steps_ahead=ahead, cost_weight=weight, now=now
    )


@given(
    work=WORKS,
    least=st.integers(1, 3),
    more=st.integers(0, 12),
    sequences=st.none() | st.integers(1, 256),
    learner=LEARNERS,
    preparers=PREPARERS,
    ahead=st.integers(1, 4),
    weight=st.floats(0, 1),
    recomputes=st.booleans(),
    now=st.none() | st.integers(1, 15),
)
@settings(max_examples=40, deadline=None)
def test_a_split_keeps_to_all_limits_and_is_no_faster_than_any_stage(
    work: StepWork,
    least: int,
    more: int,
    sequences: int | None,
    learner: Learner,
    preparers: Preparers,
    ahead: int,
    weight: float,
    recomputes: bool,
    now: int | None,
) -> None:
    actors = Actors(LATENCY, least, least + more, sequences, None, 1.0, recomputes)
    found = split_by_rates(work, actors, learner, preparers, steps_ahead=ahead, cost_weight=weight, now=now)
    assert least <= found.actors <= least + more
    assert preparers.least <= found.preparers.instances <= preparers.most
    assert found.seconds >= max(learner.seconds, learner.publishing, found.generation)
    assert found.seconds >= preparers.work / found.preparers.instances * (1 - 1e-9)
    assert 1 <= found.places <= (sequences or found.places)
    assert 0 < found.batch <= found.places
    # No order of the work decodes a token in less than the part of a pass that it adds.
    assert found.generation * found.actors >= work.tokens * LATENCY.sequence_seconds
    others = found.preparers.instances * preparers.price + learner.instances * learner.price
    assert found.cost == pytest.approx(found.seconds * (found.actors + others))


@given(WORKS, st.floats(0.1, 500), PREPARERS, st.integers(1, 4), st.integers(2, 8))
@settings(max_examples=20, deadline=None)
def test_no_other_number_of_actors_is_faster_at_0_or_cheaper_at_1(
    work: StepWork, learning: float, preparers: Preparers, ahead: int, most: int
) -> None:
    learner = Learner(4, learning)

    def of(least: int, most: int, weight: float) -> RateSplit:
        actors = replace(ACTORS, least=least, most=most)
        return split_by_rates(work, actors, learner, preparers, steps_ahead=ahead, cost_weight=weight)

    # An actor needs a sample at least.
    counts = range(1, min(most, work.groups * work.group_samples) + 1)
    others = [of(count, count, 0.5) for count in counts]
    assert of(1, most, 0.0).seconds == pytest.approx(min(each.seconds for each in others))
    assert of(1, most, 1.0).cost == pytest.approx(min(each.cost for each in others))


def test_a_slower_learner_has_fewer_actors_beside_it() -> None:
    counts = [split(learning).actors for learning in (10.0, 30.0, 60.0, 120.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_learner_is_not_made_to_wait_where_time_is_all_that_counts() -> None:
    fast = split(100.0, weight=0.0)
    assert fast.generation <= 100.0 and fast.seconds == 100.0
    # One actor fewer would hold it up.
    fewer = split_by_rates(
        WORK,
        replace(ACTORS, most=fast.actors - 1),
        Learner(12, 100.0),
        Preparers(),
        steps_ahead=1,
        cost_weight=0.0,
    )
    assert fewer.seconds > 100.0


def test_more_staleness_makes_batches_larger_and_steps_shorter() -> None:
    found = [split(1.0, weight=0.0, ahead=ahead) for ahead in (1, 2, 4)]
    seconds = [each.seconds for each in found]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert found[0].batch < found[-1].batch


def test_runaways_that_no_sample_is_planned_as_keep_groups_under_way() -> None:
    loads = [SampleLoad(prompt, index, 100, 300.0) for prompt in range(16) for index in range(8)]
    plain = StepWork.of(loads)
    tails = StepWork.of(loads, dict.fromkeys(range(16), 0.05), 4000.0)
    assert tails.tokens == pytest.approx(plain.tokens + 16 * 8 * 0.05 * 4000)
    assert plain.running == 8
    assert tails.running < 4, "others of the group are complete meanwhile"
    # Samples that are planned as runaways are not counted twice.
    planned = [SampleLoad(0, 0, 100, 4000.0), SampleLoad(0, 1, 100, 300.0)]
    assert StepWork.of(planned, {0: 0.5}, 4000.0) == StepWork.of(planned)


def acting(away: float) -> StepWork:
    return StepWork.of([SampleLoad(prompt, index, 200, 1000.0, away) for prompt in range(64) for index in range(8)])


def test_samples_that_are_away_leave_smaller_batches() -> None:
    here, quick, slow = (split(5.0, weight=0.1, work=acting(seconds)) for seconds in (0.0, 5.0, 500.0))
    assert here.generation < quick.generation < slow.generation
    assert slow.actors < here.actors, "batches of few samples are no quicker on more actors"


@given(away=st.floats(0, 10_000), ahead=st.integers(1, 4), weight=st.floats(0, 1), learning=st.floats(0, 200))
def test_a_group_is_under_way_for_as_long_as_it_is_decoded_and_away(
    away: float, ahead: int, weight: float, learning: float
) -> None:
    """By Little's law: no more groups are under way than staleness allows."""
    found = split(learning, weight=weight, ahead=ahead, work=acting(away))
    under_way = 64 * (ahead + 0.5)
    assert found.seconds * under_way / 64 >= away + 1000 * LATENCY.step_seconds
    assert 0 < found.batch <= found.places


def test_actors_stay_where_others_are_hardly_better() -> None:
    best = split().actors
    assert split(now=best + 1).actors == best + 1, f"a gain below {STAYS:.0%}"
    assert split(now=1).actors == best
    assert split(now=24).actors == best


def test_numbers_hardly_change_where_lengths_vary_and_only_the_cost_counts() -> None:
    chance = random.Random(0)
    for learning in (1.0, 20.0, 60.0):
        now, counts = None, []
        for _ in range(40):
            varied = replace(WORK, tokens=WORK.tokens * chance.uniform(0.85, 1.15))
            now = split(learning, weight=1.0, now=now, work=varied).actors
            counts.append(now)
        assert sum(one != other for one, other in pairwise(counts)) <= 4


def test_a_slow_learner_does_not_make_numbers_change_back_and_forth() -> None:
    chance, now, counts = random.Random(0), None, []
    for _ in range(20):
        varied = replace(WORK, tokens=WORK.tokens * chance.uniform(0.85, 1.15))
        some = replace(ACTORS, least=1, most=8)
        found = split_by_rates(varied, some, Learner(4, 60.0), Preparers(), steps_ahead=2, cost_weight=1.0, now=now)
        now = found.actors
        counts.append(now)
    assert sum(one != other for one, other in pairwise(counts)) <= 2, counts


@given(WORKS, st.floats(0.1, 500), st.floats(0, 1), st.integers(1, 24))
@settings(max_examples=20, deadline=None)
def test_a_number_that_stays_is_hardly_worse(work: StepWork, learning: float, weight: float, now: int) -> None:
    best, found = (split(learning, weight=weight, now=each, work=work) for each in (None, now))
    fastest, cheapest = (split(learning, weight=each, work=work) for each in (0.0, 1.0))

    def weighed(one: RateSplit) -> float:
        return (1 - weight) * one.seconds / fastest.seconds + weight * one.cost / cheapest.cost

    assert weighed(found) <= weighed(best) * (1 + STAYS) + 1e-6


def test_actors_without_use_go_though_only_time_counts() -> None:
    best = split(100.0, weight=0.0)
    more = split_by_rates(
        WORK, replace(ACTORS, least=24), Learner(12, 100.0), Preparers(), steps_ahead=1, cost_weight=0.0
    )
    assert more.seconds == best.seconds and more.cost > best.cost * (1 + STAYS)
    assert split(100.0, weight=0.0, now=24).actors == best.actors


def test_a_learner_that_begins_with_the_first_groups_leaves_more_of_them_to_generate() -> None:
    """So fewer actors come to the same pace: their batches are larger."""
    slow = replace(ACTORS, least=8, most=8)
    whole, pieces = (
        split_by_rates(WORK, slow, Learner(12, 60.0, lag=lag), Preparers(), steps_ahead=1, cost_weight=0.5)
        for lag in (None, 10.0)
    )
    assert pieces.batch > whole.batch
    assert pieces.generation < whole.generation
    assert lag_of_pieces(60.0, 56.0) == 11.0, "an eighth of the groups, and the update"


def test_a_publication_beside_the_next_step_delays_weights_and_not_the_learner() -> None:
    """The simulator's plan took it for learning once, and chose 3 actors where 6 were busy."""
    within, beside, long = (
        split_by_rates(WORK, ACTORS, learner, Preparers(), steps_ahead=2, cost_weight=0.0)
        for learner in (Learner(12, 60.0), Learner(12, 40.0, publishing=20.0), Learner(12, 40.0, publishing=50.0))
    )
    assert (within.seconds, beside.seconds, long.seconds) == (60.0, 40.0, 50.0), "one version is published at a time"
    assert beside.actors > within.actors
    fixed = replace(ACTORS, least=8, most=8)
    at_once, late = (
        split_by_rates(WORK, fixed, learner, Preparers(), steps_ahead=2, cost_weight=0.5)
        for learner in (Learner(12, 60.0, lag=10.0), Learner(12, 60.0, lag=10.0, publishing=20.0))
    )
    assert late.batch < at_once.batch, "groups that are to have newer weights begin later"
