"""Migration: what the machine knows, and what each rule does with it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.moves.migration import Migration, Move
from rlhfless_operator.planner.moves.rules import ActorRatio, Repack, Saving, WaitingLearner
from rlhfless_operator.simulator.global_ratio import GlobalRatio

LATENCY = LinearLatency(0.010, 40e-6, 50e-9, 20e-6)


def until(length):
    return lambda key, tokens: (float(max(0, length - tokens)), 0.0)


def machine(rule, shares, remaining=None, **options):
    """A machine whose actors hold `shares`: name → number of samples, each a prompt of its own with 100 tokens."""
    migration = Migration(rule, remaining or until(1000), **options)
    prompt = 0
    for name, count in shares.items():
        migration.assigned(name, {(prompt + k, 0): 100 for k in range(count)})
        prompt += count
    return migration


def finish(migration, name, count):
    migration.finished(name, list(migration.actors[name].samples)[:count])


def carry_out(migration, moves):
    for move in moves:
        migration.moved(move, move.destination)


def test_an_actor_with_nothing_left_is_forgotten():
    migration = machine(None, {"a": 2})
    finish(migration, "a", 2)
    assert not migration.actors


def test_progress_updates_what_remains():
    migration = machine(None, {"a": 1})
    migration.progressed("a", {(0, 0): 300})
    migration.assess()
    sample = migration.actors["a"].samples[0, 0]
    assert (sample.context, sample.remaining) == (400, 700)


def test_events_about_what_is_gone_are_ignored():
    migration = machine(None, {"a": 1})
    migration.progressed("b", {(0, 0): 5})
    migration.progressed("a", {(9, 9): 5})
    migration.finished("b", [(0, 0)])
    assert migration.lost("b") is None
    assert migration.actors["a"].finished == 0


def test_a_lost_actor_becomes_a_move_to_a_new_one():
    migration = machine(None, {"a": 3})
    finish(migration, "a", 1)
    move = migration.lost("a")
    assert move == Move("a", ((1, 0), (2, 0)), None)
    migration.resumed("b", {(1, 0): (100, 40), (2, 0): (100, 0)})
    migration.assess()
    assert migration.actors["b"].samples[1, 0].remaining == 960


def test_without_a_rule_nothing_is_cut():
    migration = machine(None, {"a": 2, "b": 2})
    finish(migration, "a", 1)
    assert migration.decide(10) == []


def test_actor_ratio_waits_for_its_ratio_and_then_deals_to_free_slots():
    migration = machine(ActorRatio(0.5, slots=8), {"a": 4, "b": 7, "c": 6})
    finish(migration, "a", 1)
    assert migration.decide(1) == []
    finish(migration, "a", 1)
    (first, second) = sorted(migration.decide(2), key=lambda move: move.destination)
    assert {first.destination, second.destination} == {"b", "c"} and first.source == second.source == "a"
    carry_out(migration, [first, second])
    assert set(migration.actors) == {"b", "c"}


def test_actor_ratio_keeps_what_nobody_has_room_for():
    migration = machine(ActorRatio(0.5, slots=4), {"a": 4, "b": 4})
    finish(migration, "a", 2)
    assert migration.decide(1) == []


def test_global_ratio_gathers_the_tail_once_on_as_few_as_hold_it():
    migration = machine(GlobalRatio(0.5, slots=4, samples=24), {"a": 8, "b": 8, "c": 8})
    for name, count in (("a", 7), ("b", 4)):
        finish(migration, name, count)
    assert migration.decide(1) == []
    finish(migration, "c", 7)
    moves = migration.decide(2)
    carry_out(migration, moves)
    assert set(migration.actors) == {"b", "a"} or set(migration.actors) == {"b", "c"}
    assert sum(len(actor.samples) for actor in migration.actors.values()) == 6
    assert migration.decide(3) == []


def test_repack_empties_ramping_down_actors_into_the_fullest_with_room():
    migration = machine(Repack(roofline_batch=8), {"a": 8, "b": 8, "c": 8})
    for name, left in (("a", 2), ("b", 5), ("c", 3)):
        migration.progressed(name, {})
        finish(migration, name, 8 - left)
    assert migration.decide(1) == []
    moves = migration.decide(6)
    assert moves == [Move("a", tuple(migration.actors["a"].samples), "b")]
    carry_out(migration, moves)
    assert migration.decide(7) == []


def test_repack_leaves_actors_at_their_peak():
    migration = machine(Repack(roofline_batch=8), {"a": 2, "b": 2})
    for name in "ab":
        migration.progressed(name, {})
    assert migration.decide(6) == []


def test_saving_gathers_long_tails():
    migration = machine(Saving(LATENCY, slots=64), {"a": 1, "b": 2, "c": 1})
    moves = migration.decide(1)
    carry_out(migration, moves)
    assert len(migration.actors) == 1


def test_saving_leaves_what_is_nearly_done():
    migration = machine(Saving(LATENCY, slots=64, pause_seconds=0.5), {"a": 1, "b": 1}, until(80))
    assert migration.decide(1) == []


def test_saving_looks_once_a_period():
    migration = machine(Saving(LATENCY, slots=2, period=1, hysteresis=1e9), {"a": 1, "b": 1})
    assert migration.decide(1) == []
    migration._rule.hysteresis = 0
    assert migration.decide(1.5) == []
    assert len(migration.decide(2)) == 1


def test_saving_keeps_to_slots_and_memory():
    assert machine(Saving(LATENCY, slots=3), {"a": 2, "b": 2}).decide(1) == []
    assert machine(Saving(LATENCY, slots=8, kv_tokens=4000), {"a": 2, "b": 2}).decide(1) == []


def test_saving_respects_the_price_of_time():
    heavy = LinearLatency(0.001, 500e-6, 0, 0)
    shares = {"a": 20, "b": 20}
    assert machine(Saving(heavy, slots=64, time_price=5), shares).decide(1) == []
    assert machine(Saving(heavy, slots=64, time_price=0, pause_seconds=0), shares).decide(1)


def test_saving_may_delay_responses_after_which_a_learner_goes_on_in_any_case():
    heavy = LinearLatency(0.001, 500e-6, 0, 0)
    shares = {"a": 20, "b": 20}

    def moves(learner):
        return machine(Saving(heavy, slots=64, time_price=5, pause_seconds=0, learner=learner), shares).decide(10)

    assert moves(None) == []
    assert len(moves(WaitingLearner(actors=1, seconds=1000, earliest=0))) == 1
    assert moves(WaitingLearner(actors=1, seconds=0.01, earliest=0)) == []
    assert moves(WaitingLearner(actors=2, seconds=1000, earliest=0, began=-990)) == []
    assert moves(WaitingLearner(actors=0, seconds=1000, earliest=0)) == [], "it waits for the last response"


def test_saving_delays_nothing_for_a_learner_beside_which_the_samples_do_not_fit():
    heavy = LinearLatency(0.001, 500e-6, 0, 0)

    def moves(actors):
        learner = WaitingLearner(actors=actors, seconds=1000, earliest=0)
        rule = Saving(heavy, slots=64, time_price=5, pause_seconds=0, learner=learner)
        return machine(rule, dict.fromkeys("abcd", 20)).decide(10)

    assert moves(1) == []
    assert moves(2)


def test_a_learner_waits_for_its_moment_and_for_its_gpus():
    learner = WaitingLearner(actors=2, seconds=10, earliest=5)
    assert [learner.seconds_left(2, 0), learner.seconds_left(3, 4), learner.seconds_left(3, 20)] == [15, 11, 10]
    assert learner.seconds_left(2, 21) == 10
    assert learner.seconds_left(2, 25) == 6
    assert learner.seconds_left(2, 40) == 0


def test_saving_does_not_burden_an_actor_that_may_hold_a_runaway():
    slow = LinearLatency(0.010, 0.0002, 0, 0)
    shares = {"a": 30, "b": 30, "c": 1}

    def outlook(key, tokens):
        return (100.0, 0.02) if key[0] < 60 else (700.0, 0.0)

    options = {"slots": 64, "pause_seconds": 0, "time_price": 20}
    assert len(machine(Saving(slow, **options), shares, outlook).decide(1)) == 1
    assert machine(Saving(slow, longest=2000, **options), shares, outlook).decide(1) == []


def test_a_sample_is_moved_so_often_and_no_more():
    migration = machine(Saving(LATENCY, slots=64, period=0), {"a": 1, "b": 2}, max_moves=1)
    carry_out(migration, migration.decide(1))
    (name,) = migration.actors
    moved = [key for key, sample in migration.actors[name].samples.items() if sample.moves]
    assert len(moved) == 1
    migration.assigned("z", {(50, 0): 100, (51, 0): 100, (52, 0): 100, (53, 0): 5000})
    moves = migration.decide(2)
    assert all(key not in move.samples for move in moves for key in moved)


rules = st.sampled_from(["actor", "global", "repack", "saving"])


@given(rules, st.lists(st.integers(1, 12), min_size=2, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_no_sample_is_lost_or_held_twice_whatever_happens(name, sizes, data):
    rule = {
        "actor": ActorRatio(0.5, slots=16),
        "global": GlobalRatio(0.6, slots=16, samples=sum(sizes)),
        "repack": Repack(roofline_batch=16, period=1),
        "saving": Saving(LATENCY, slots=16),
    }[name]
    migration = machine(rule, {f"a{k}": size for k, size in enumerate(sizes)})
    left = {key for actor in migration.actors.values() for key in actor.samples}
    for now in range(2, 8):
        for actor in list(migration.actors):
            held = list(migration.actors[actor].samples)
            migration.progressed(actor, dict.fromkeys(held, now * 10))
            done = held[: data.draw(st.integers(0, len(held)))]
            migration.finished(actor, done)
            left -= set(done)
        moves = migration.decide(now)
        assert not {move.source for move in moves} & {move.destination for move in moves}
        carry_out(migration, moves)
        held = [key for actor in migration.actors.values() for key in actor.samples]
        assert sorted(held) == sorted(left)


@pytest.mark.parametrize("rule", [ActorRatio, GlobalRatio])
def test_a_ratio_outside_its_range_is_named(rule):
    with pytest.raises(ValueError, match=r"ratio is 1.5: .* nearest is 1"):
        rule(1.5, 8)


def test_a_negative_number_of_moves_is_named():
    with pytest.raises(ValueError, match="max_moves is -1"):
        Migration(None, until(1), max_moves=-1)


def test_nothing_is_worked_out_while_no_rule_is_due():
    asked = []

    def outlook(key, tokens):
        asked.append(key)
        return 500.0, 0.0

    migration = machine(Saving(LATENCY, slots=8, period=5), {"a": 6, "b": 6, "c": 6}, outlook)
    assert migration.decide(1) == [] and not asked, "no two fit one"
    finish(migration, "a", 5)
    finish(migration, "b", 5)
    assert migration.decide(2) and len(asked) == 8
    assert migration.decide(3) == [] and len(asked) == 8, "the period has not passed"


def one_by_one(rule, actors, now):
    """The moves of `Saving`, each pair of actors looked at by itself."""
    latency, step, prefill = rule.latency, rule.latency.step_seconds, rule.latency.prefill_token_seconds
    names = [actor.name for actor in actors]
    state = {
        actor.name: [
            actor.rounds, max(actor.rounds, rule.longest - actor.least_tokens), actor.risk, actor.work(latency),
            actor.context, actor.context + sum(each.remaining for each in actor.samples.values()), len(actor.samples),
        ]
        for actor in actors
    }  # fmt: skip

    def seconds(rounds, worst, risk, work, *_):
        return step * (rounds + min(1.0, risk) * (worst - rounds)) + work

    def joined(a, b, cost=0.0):
        return [max(a[0], b[0]), max(a[1], b[1]), a[2] + b[2], a[3] + b[3] + cost, *(a[k] + b[k] for k in (4, 5, 6))]

    horizon = max(seconds(*each) for each in state.values())
    receivers, moves = set(), []
    for source in sorted(names, key=lambda name: state[name][4]):
        best, best_gain, best_cost = None, 0.0, 0.0
        for target in names:
            if source in receivers or target == source or target not in state:
                continue
            mine, theirs = state[source], state[target]
            if mine[6] + theirs[6] > rule.slots or mine[5] + theirs[5] > rule.kv_tokens:
                continue
            own = rule.pause_seconds + (prefill * theirs[4] if rule.restarts_receiver else 0.0)
            cost = prefill * mine[4] + (0.0 if target in receivers else own)
            later = max(0.0, seconds(*joined(theirs, mine, cost)) - horizon)
            gain = step * min(mine[0], theirs[0]) - (1 + rule.hysteresis) * cost - rule.time_price * later
            if gain > best_gain * (1 + 1e-12):
                best, best_gain, best_cost = target, gain, cost
        if best is not None:
            state[best] = joined(state[best], state.pop(source), best_cost)
            horizon = max(horizon, seconds(*state[best]))
            receivers.add(best)
            moves.append((source, best))
    return moves


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 1800), st.integers(0, 1500)), min_size=1, max_size=6), min_size=2, max_size=8
    ),
    st.booleans(),
    st.floats(0, 20),
)
@settings(max_examples=80, deadline=None)
def test_all_pairs_at_once_are_what_each_pair_is(shares, restarts, price):
    rest = {}
    migration = Migration(None, lambda key, tokens: rest[key])
    for number, share in enumerate(shares):
        keys = {(number, k): each for k, each in enumerate(share)}
        rest |= {key: (float(remaining), 0.01 * key[1]) for key, (remaining, _) in keys.items()}
        migration.assigned(f"a{number}", dict.fromkeys(keys, 100))
        migration.progressed(f"a{number}", {key: tokens for key, (_, tokens) in keys.items()})
    migration.assess()
    options = {"longest": 2048, "time_price": price, "restarts_receiver": restarts, "hysteresis": 0.25}
    rule = Saving(LATENCY, slots=10, kv_tokens=20_000, pause_seconds=0.3, **options)
    actors = list(migration.actors.values())
    expected = one_by_one(rule, actors, 0.0)
    assert [(move.source, move.destination) for move in rule.decide(actors, 0.0)] == expected
