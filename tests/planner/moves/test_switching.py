"""When newer weights are worth the recomputation of an actor's contexts."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.moves.migration import Actor, Unfinished
from rlhfless_operator.planner.moves.switching import COST_SHARE, is_worth_switching

LATENCY = LinearLatency(step_seconds=0.01, sequence_seconds=1e-4, context_seconds=1e-7, prefill_token_seconds=1e-4)

samples = st.builds(
    Unfinished,
    prompt_tokens=st.integers(1, 4000),
    tokens=st.integers(0, 30_000),
    remaining=st.floats(0, 30_000),
)
actors = st.builds(lambda held: Actor("a", dict(enumerate(held))), st.lists(samples, min_size=1, max_size=20))  # type: ignore[arg-type]
pauses = st.floats(0, 100)


def actor_of(*held: tuple[int, int, float]) -> Actor:
    return Actor("a", {(0, index): Unfinished(*each) for index, each in enumerate(held)})


def test_an_actor_with_a_long_way_to_go_switches_and_one_that_is_nearly_done_does_not() -> None:
    # 10,000 tokens of context are a second of prefill, and 2,000 steps are more than 20 seconds.
    assert is_worth_switching(actor_of((5_000, 5_000, 2_000.0)), LATENCY, pause_seconds=0.5)
    assert not is_worth_switching(actor_of((5_000, 5_000, 200.0)), LATENCY, pause_seconds=0.5)


def test_contexts_that_are_kept_cost_nothing() -> None:
    actor = actor_of((5_000, 5_000, 1_000.0))
    assert not is_worth_switching(actor, LATENCY, 0.5)
    assert is_worth_switching(actor, LATENCY, 0.5, 0)
    assert not is_worth_switching(actor, LATENCY, 5.0, 0), "the pause remains"


def test_an_actor_that_holds_nothing_stays_as_it_is() -> None:
    assert not is_worth_switching(Actor("a"), LATENCY, pause_seconds=0.0)


@given(actor=actors, pause=pauses)
def test_what_is_left_takes_at_most_a_tenth_longer(actor: Actor, pause: float) -> None:
    rounds = max(sample.remaining for sample in actor.samples.values())
    left = rounds * LATENCY.step_seconds + sum(
        LATENCY.sequence_work(sample.context, sample.remaining) for sample in actor.samples.values()
    )
    cost = pause + LATENCY.prefill_token_seconds * sum(sample.context for sample in actor.samples.values())
    switches = is_worth_switching(actor, LATENCY, pause)
    assert switches == (cost <= COST_SHARE * left) or abs(cost - COST_SHARE * left) < 1e-9 * cost


@given(actor=actors, pause=pauses, more=st.floats(0, 1000), longer=st.floats(0, 100))
def test_more_to_decode_never_speaks_against_a_switch_nor_a_longer_pause_for_one(
    actor: Actor, pause: float, more: float, longer: float
) -> None:
    if is_worth_switching(actor, LATENCY, pause + longer):
        assert is_worth_switching(actor, LATENCY, pause)
    if is_worth_switching(actor, LATENCY, pause):
        further = {key: replace(sample, remaining=sample.remaining + more) for key, sample in actor.samples.items()}
        assert is_worth_switching(Actor("a", further), LATENCY, pause)
