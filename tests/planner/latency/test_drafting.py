"""With drafts a round takes the least of a few linear models; plans are no slower by it, and the bound still holds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.drafting import DraftedLatency, Drafts
from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.moves.migration import Actor, Unfinished
from rlhfless_operator.planner.moves.rules import Saving
from rlhfless_operator.planner.step.bounds import alone_seconds, lower_bound
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.loads import Loads, SampleLoad
from rlhfless_operator.planner.step.planning import Limits, Planner, plan
from rlhfless_operator.planner.step.whole_step import plan_step

PLAIN = LinearLatency(0.01, 2e-4, 2e-7, 1e-4, draft_seconds=3e-4)
SHARES = st.sampled_from((0.0, 0.3, 0.6, 0.9, 1.0))
DRAFTS = st.builds(Drafts, SHARES, SHARES, st.sampled_from((1, 4, 16)))
LENGTHS = st.lists(st.integers(1, 1500), min_size=1, max_size=12)


def loads_of(lengths: list[int], context: int = 40) -> list[SampleLoad]:
    return [SampleLoad(prompt, 0, context, float(length)) for prompt, length in enumerate(lengths)]


def test_a_pass_with_drafts_gives_what_is_right_of_them() -> None:
    drafts = Drafts(coverage=0.5, acceptance=0.8)
    assert drafts.tokens(0) == 1
    assert drafts.tokens(2) == pytest.approx(1 + 0.5 * (0.8 + 0.64))
    assert drafts.rows(2) == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coverage": 1.5, "acceptance": 0.5}, "coverage is 1.5"),
        ({"coverage": 0.5, "acceptance": math.nan}, "acceptance is nan"),
        ({"coverage": 0.5, "acceptance": 0.5, "longest": 0}, "longest is 0"),
    ],
)
def test_what_is_no_share_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Drafts(**fields)  # type: ignore[arg-type]


@given(DRAFTS, st.integers(1, 256), st.floats(0, 8000))
@settings(max_examples=60, deadline=None)
def test_a_round_takes_what_the_best_number_of_drafts_takes(drafts: Drafts, batch: int, context: float) -> None:
    latency = DraftedLatency(PLAIN, drafts)
    # A pass by pass account: the weights, every sequence and every drafted row, over what each sequence gains.
    rounds = [
        (PLAIN.decode_seconds(batch, context) + batch * drafts.rows(each) * PLAIN.draft_seconds) / drafts.tokens(each)
        for each in range(drafts.longest + 1)
    ]
    assert latency.decode_seconds(batch, context) == pytest.approx(min(rounds))
    assert latency.decode_seconds(batch, context) <= PLAIN.decode_seconds(batch, context)
    several = latency.round_seconds(np.array([batch, 1.0]), np.array([batch * context, context]))
    assert several == pytest.approx([min(rounds), latency.decode_seconds(1, context)])


def test_smaller_batches_draft_more() -> None:
    latency = DraftedLatency(PLAIN, Drafts(1.0, 0.8))
    drafted = [latency.lines.index(latency.at(batch, 100)) for batch in (1, 4, 16, 64, 256)]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > drafted[-1]


@given(LENGTHS, DRAFTS, st.sampled_from((None, 3)))
@settings(max_examples=50, deadline=None)
def test_no_share_takes_longer_than_with_a_fixed_number_of_drafts(
    lengths: list[int], drafts: Drafts, batch: int | None
) -> None:
    samples, latency = loads_of(lengths), DraftedLatency(PLAIN, drafts)
    everything = (np.argsort([-length for length in lengths], kind="stable"),)
    (seconds,) = Loads(samples, latency, kv_tokens=None, max_batch=batch).seconds(everything, 1.0)
    # With one number of drafts throughout, (3) of docs/research/planner.md holds of rounds; exact where none waits.
    fixed = [
        float(Loads(samples, line, kv_tokens=None, max_batch=batch).decoded(everything, 1.0, 0.0).last[0])
        for line in latency.lines
    ]
    assert seconds <= min(fixed) * (1 + 1e-9)
    alone = alone_seconds(np.array([float(max(lengths))]), np.array([40.0]), latency)
    assert seconds >= float(alone[0])


@given(LENGTHS, st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_without_anything_right_responses_end_when_they_do_without_drafts(lengths: list[int], shares: int) -> None:
    samples = [SampleLoad(number // 3, number % 3, 40 + number, float(each)) for number, each in enumerate(lengths)]
    division = [np.arange(len(samples))[number::shares] for number in range(min(shares, len(samples)))]
    plain, drafted = (
        Loads(samples, latency, kv_tokens=None, max_batch=None).decoded(division, 1.0, 0.0)
        for latency in (PLAIN, DraftedLatency(PLAIN, Drafts(1.0, 0.0)))
    )
    assert drafted.ends == pytest.approx(plain.ends)


@given(LENGTHS, DRAFTS, st.integers(1, 6), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_a_plan_with_drafts_is_no_worse_and_keeps_to_the_bound(
    lengths: list[int], drafts: Drafts, instances: int, weight: float
) -> None:
    samples, limits = loads_of(lengths), Limits(max_instances=instances)
    drafted = Planner(samples, DraftedLatency(PLAIN, drafts), limits, 2.0)
    plain = Planner(samples, PLAIN, limits, 2.0)
    assert drafted.least_seconds <= plain.least_seconds * (1 + 1e-3)
    assert drafted.least_instance_seconds <= plain.least_instance_seconds * (1 + 1e-9)
    deadline = plain.weighted(weight).expected_seconds * (1 + 1e-9)
    made = drafted.within_deadline(deadline)
    assert made.expected_seconds <= deadline * (1 + 1e-9)
    assert made.expected_instance_seconds <= plain.within_deadline(deadline).expected_instance_seconds * (1 + 1e-3)
    assert made.lower_bound_instance_seconds <= made.expected_instance_seconds * (1 + 1e-9)
    assert sorted(each.prompt for share in made.shares for each in share.samples) == list(range(len(lengths)))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    drafts=DRAFTS,
    contexts=st.sampled_from((0, 40, 4000)),
    instances=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_no_schedule_of_passes_and_drafts_costs_less_than_the_bound(
    lengths: list[int], drafts: Drafts, contexts: int, instances: int, data: st.DataObject
) -> None:
    """Passes at random: who takes part, on which instance, and how many tokens are drafted for each."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    eager = random.random()
    start, batch = 0.5, 3
    total, made = 0.0, np.zeros(len(lengths))
    busy = np.zeros(instances)
    free_at = np.zeros(len(lengths))
    while (left := np.flatnonzero(made < lengths)).size:
        number = int(random.integers(instances))
        chosen = random.permutation(left)[: int(random.integers(1, batch + 1))]
        begin = max(busy[number], free_at[chosen].max())
        seconds = PLAIN.step_seconds
        for sample in chosen:
            each = int(random.integers(drafts.longest + 1)) if random.random() < eager else 0
            gained = min(drafts.tokens(each), lengths[sample] - made[sample])
            context = contexts + made[sample] + gained / 2
            seconds += PLAIN.sequence_seconds + PLAIN.context_seconds * context
            seconds += drafts.rows(each) * PLAIN.draft_seconds
            made[sample] += gained
        # Waiting for a sample is not charged here: the sample's actor costs nothing in the meantime.
        busy[number] = begin + seconds
        free_at[chosen] = busy[number]
        total += seconds
    took = start + float(busy.max())
    bound = lower_bound(
        np.array(lengths, dtype=float),
        np.full(len(lengths), float(contexts)),
        DraftedLatency(PLAIN, drafts),
        took,
        prefill_tokens=0.0,
        start_seconds=start,
        max_batch=batch,
    )
    assert bound <= (total + start * max(1, int((busy > 0).sum()))) * (1 + 1e-9)


def test_without_anything_right_the_bound_is_that_without_drafts() -> None:
    lengths, contexts = np.array([300.0, 20.0, 70.0]), np.array([10.0, 500.0, 0.0])
    bounds = [
        lower_bound(lengths, contexts, latency, 4.0, prefill_tokens=10.0, start_seconds=0.5)
        for latency in (PLAIN, DraftedLatency(PLAIN, Drafts(1.0, 0.0)), DraftedLatency(PLAIN, Drafts(0.0, 1.0)))
    ]
    assert bounds == pytest.approx([bounds[0]] * 3)


def test_the_bound_is_reached_by_a_lone_response() -> None:
    latency = DraftedLatency(PLAIN, Drafts(0.8, 0.9))
    samples = loads_of([2000])
    made = plan("even", samples, latency, Limits())
    alone = float(alone_seconds(np.array([2000.0]), np.array([40.0]), latency)[0])
    assert made.expected_seconds == pytest.approx(alone + 40 * PLAIN.prefill_token_seconds, rel=1e-3)
    assert made.lower_bound_instance_seconds == pytest.approx(made.expected_instance_seconds, rel=1e-3)


def test_tails_that_are_short_in_passes_need_fewer_actors() -> None:
    """Three runaways hold an actor each where time counts; drafted, one holds them all."""
    lengths = [2000] * 3 + [300] * 61
    profile = InstanceProfile(PLAIN, 1, 10**9, startup_seconds=2.0, weight_load_seconds=1.0)
    training = Training(gpus=8, token_gpu_seconds=1e-4, start_seconds=1.0, update_seconds=0.5)

    def actors(latency: LinearLatency | DraftedLatency, deadline: float) -> int:
        return len(Planner(loads_of(lengths), latency, Limits(max_instances=8), 3.0).within_deadline(deadline).shares)

    deadline = Planner(loads_of(lengths), PLAIN, Limits(max_instances=8), 3.0).least_seconds * 1.05
    assert actors(DraftedLatency(PLAIN, Drafts(1.0, 0.8)), deadline) < actors(PLAIN, deadline)
    plans = [
        plan_step(
            loads_of(lengths),
            InstanceProfile(latency, profile.gpus, profile.kv_tokens, 2.0, 1.0),
            Limits(max_instances=8),
            training,
            cost_weight=0.5,
            ready_seconds=1.0,
        )
        for latency in (PLAIN, DraftedLatency(PLAIN, Drafts(1.0, 0.8)))
    ]
    assert plans[1].expected_seconds < plans[0].expected_seconds
    assert plans[1].expected_gpu_seconds < plans[0].expected_gpu_seconds


def test_a_move_saves_less_where_the_tail_is_drafted() -> None:
    """Emptying an actor saves its rounds' constant, which drafts make smaller; what it costs stays the same."""

    def moves(drafts: Drafts) -> int:
        actors = [Actor(name) for name in ("one", "two")]
        for actor in actors:
            actor.samples[0 if actor.name == "one" else 1, 0] = Unfinished(50, 100, remaining=200.0)
        rule = Saving(
            DraftedLatency(PLAIN, drafts), slots=64, pause_seconds=0.7, time_price=0.0,
            hysteresis=0.25,
        )  # fmt: skip
        return len(rule.decide(actors, 1.0))

    assert moves(Drafts(1.0, 0.0)) == 1
    assert moves(Drafts(1.0, 0.9)) == 0
