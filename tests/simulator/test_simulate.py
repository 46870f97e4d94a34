"""The simulator: its instances, its stages, its baselines, its traces, and what it says of bad input."""

import dataclasses
import math
import re
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless_functions.generation.rollout_files import FlushSchedule
from rlhfless_operator.planner.lengths import rank_correlation
from rlhfless_operator.planner.moves.migration import Move
from rlhfless_operator.planner.moves.rules import ActorRatio, Repack, Saving
from rlhfless_operator.planner.step.bounds import lower_bound
from rlhfless_operator.planner.step.loads import Loads, SampleLoad
from rlhfless_operator.simulator.generation import Handling, run_generation
from rlhfless_operator.simulator.global_ratio import GlobalRatio
from rlhfless_operator.simulator.instance import Instance, Response
from rlhfless_operator.simulator.page import scenario_page
from rlhfless_operator.simulator.policies import COMPLETE, POLICIES, find_policy
from rlhfless_operator.simulator.scenarios import SCENARIOS
from rlhfless_operator.simulator.simulate import METRICS, simulate, table
from rlhfless_operator.simulator.steps import run_policy
from rlhfless_operator.simulator.traces import LengthStatistics, generate, read_trace, write_trace
from tests.simulator import small_scenario
from tests.simulator.small_scenario import LATENCY, PROFILE

SMALL = dataclasses.replace(small_scenario.SMALL, steps_per_epoch=2)


def responses(*lengths, prompt_tokens=100):
    return [Response(prompt, 0, prompt_tokens, length) for prompt, length in enumerate(lengths)]


def stepwise(lengths, prompt_tokens=100, max_batch=10**9):
    """End times of a batch, step by step."""
    now, waiting, running, ends = 0.0, list(enumerate(lengths)), {}, {}
    while waiting or running:
        while waiting and len(running) < max_batch:
            number, length = waiting.pop(0)
            running[number] = [0, length]
            now += LATENCY.prefill_token_seconds * prompt_tokens
        # The mean context within a step is half a token more.
        contexts = sum(prompt_tokens + made + 0.5 for made, _ in running.values())
        now += LATENCY.step_seconds + len(running) * LATENCY.sequence_seconds + LATENCY.context_seconds * contexts
        for number, state in list(running.items()):
            state[0] += 1
            if state[0] == state[1]:
                ends[number] = now
                del running[number]
    return ends


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_an_instance_ends_responses_when_a_step_by_step_batch_does(lengths, max_batch):
    instance = Instance("a", LATENCY, 0.0, max_batch=max_batch, kv_tokens=10**9)
    instance.add(responses(*lengths))
    ended = {key[0]: at for at, key in instance.advance(math.inf if not lengths else 10**6)}
    expected = stepwise(lengths, max_batch=max_batch)
    assert {number: pytest.approx(at, rel=1e-6) for number, at in expected.items()} == ended
    assert instance.empty


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.lists(st.floats(0, 2), max_size=5))
@settings(max_examples=40, deadline=None)
def test_looking_at_an_instance_changes_nothing(lengths, looks):
    ends = []
    for moments in ([], sorted(looks)):
        instance = Instance("a", LATENCY, 0.0, max_batch=4, kv_tokens=10**9)
        instance.add(responses(*lengths))
        found = []
        for moment in [*moments, 1e6]:
            found += instance.advance(moment)
            instance.tokens()
        ends.append({key: pytest.approx(at, rel=1e-6) for at, key in found})
    assert ends[0].keys() == ends[1].keys()
    assert all(ends[0][key].expected == ends[1][key] for key in ends[0])


def test_the_planner_forecasts_what_the_simulator_does():
    lengths = [400, 310, 300, 120, 80, 80, 33]
    samples = [SampleLoad(prompt, 0, 100, length) for prompt, length in enumerate(lengths)]
    loads = Loads(samples, LATENCY, kv_tokens=None, max_batch=None)
    run = run_generation(
        [responses(*lengths)], PROFILE, lambda key, tokens: (0, 0), Handling(ready_seconds=3.0), max_batch=99
    )
    (seconds,) = loads.seconds([np.arange(7)], 3.0)
    assert run.seconds == pytest.approx(seconds)
    forecast = loads.ends(np.arange(7), 3.0)
    assert [run.ends[prompt, 0] for prompt in range(7)] == pytest.approx(forecast.tolist())


def outlook_of(shares):
    truth = {each.key: each.length for share in shares for each in share}
    return lambda key, tokens: (truth[key] - tokens, 0.0)


RULES = {
    "none": lambda n: None,
    "actor": lambda n: ActorRatio(0.5, 64),
    "global": lambda n: GlobalRatio(0.7, 64, samples=n),
    "repack": lambda n: Repack(64, period=0.5),
    "saving": lambda n: Saving(LATENCY, 64, period=0.2, pause_seconds=0.05, time_price=0.1),
}


@pytest.mark.parametrize("rule", RULES)
@given(
    shares=st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=10), min_size=1, max_size=5),
    failures=st.sampled_from([0.0, 400.0]),
    flushes=st.sampled_from([None, lambda share, now: FlushSchedule(share, 2.0, now)]),
)
@settings(max_examples=15, deadline=None)
def test_every_response_ends_once_and_nobody_beats_the_bound(rule, shares, failures, flushes):
    prompt, given_out = 0, []
    for lengths in shares:
        given_out.append([Response(prompt + k, 0, 50, length) for k, length in enumerate(lengths)])
        prompt += len(lengths)
    handling = Handling(
        RULES[rule](prompt), tick_seconds=0.2, ready_seconds=3.0, failures_per_hour=failures, restarts_receiver=True,
        flushes=flushes,
    )  # fmt: skip
    keys = {each.key for share in given_out for each in share}
    lengths = np.array([float(each.length) for share in given_out for each in share])
    run = run_generation(
        given_out, PROFILE, outlook_of(given_out), handling, max_batch=64, random=np.random.default_rng(0)
    )
    assert set(run.ends) == keys
    held = sum(each.end - each.begin for each in run.held)
    busy = sum(each.busy for each in run.held)
    assert busy <= held + 1e-6
    bound = lower_bound(
        lengths, np.full(len(lengths), 50.0), LATENCY, run.seconds, prefill_tokens=50.0 * prompt, start_seconds=3.0,
        max_batch=64,
    )  # fmt: skip
    assert bound <= held * (1 + 1e-9)


def test_our_rule_gathers_a_tail_and_saves():
    def shares():
        return [[Response(10 * k + i, 0, 50, 3000 if i == 0 else 60) for i in range(6)] for k in range(4)]

    costs = []
    for rule in (None, RULES["saving"](24)):
        given_out = shares()
        run = run_generation(given_out, PROFILE, outlook_of(given_out), Handling(rule, ready_seconds=3.0), max_batch=64)
        costs.append(sum(each.end - each.begin for each in run.held))
    assert costs[1] < 0.5 * costs[0]


@dataclasses.dataclass
class MovesAlways:
    """Has the first actor's last sample moved to the second whenever it is asked."""

    moved_at: list[float] = dataclasses.field(default_factory=list)

    def due(self, actors, now):
        return len(actors) > 1

    def decide(self, actors, now):
        self.moved_at.append(now)
        return [Move(actors[0].name, (list(actors[0].samples)[-1],), actors[1].name)]


def test_nobody_is_cut_again_before_those_who_were_go_on():
    # As in the live loop, tests/training/stages/test_generation.py.
    rule = MovesAlways()
    given_out = responses(*([400] * 16))
    shares = [given_out[:8], given_out[8:]]
    handling = Handling(rule, max_moves=100, tick_seconds=0.25, pause_seconds=1.0)
    run_generation(shares, PROFILE, outlook_of(shares), handling, max_batch=64)
    assert len(rule.moved_at) > 3
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(rule.moved_at))


def test_a_rule_knows_what_instances_have_told():
    # Of six pairs on the first actor one response each is long: no group ends before the flush.
    def shares():
        first = [Response(prompt, index, 50, 900 if index else 60) for prompt in range(6) for index in range(2)]
        return [first, [Response(9, 0, 50, 2000)]]

    moved_at = []
    for flushes in (None, lambda share, now: FlushSchedule(share, 5.0, now)):
        given_out, handling = shares(), Handling(ActorRatio(0.5, 64), flushes=flushes)
        run = run_generation(given_out, PROFILE, outlook_of(given_out), handling, max_batch=64)
        assert run.moves == 6
        moved_at.append(min(each.end for each in run.held))
    at_once, told = moved_at
    assert at_once < 5.0 <= told < 5.5


def test_a_lost_instance_costs_what_was_not_flushed():
    calm, stormy = (
        run_generation(
            [responses(2000)], PROFILE, lambda key, tokens: (0, 0),
            Handling(ready_seconds=3.0, failures_per_hour=rate), max_batch=8, random=np.random.default_rng(3),
        )
        for rate in (0.0, 200.0)
    )  # fmt: skip
    assert stormy.lost > 0 and calm.lost == 0
    assert len(stormy.held) == 1 + stormy.lost
    # Each loss costs a start, half a flush interval and the prefill of what was kept.
    assert calm.seconds + 3 * stormy.lost < stormy.seconds < calm.seconds + 7 * stormy.lost


def test_generated_lengths_have_the_published_statistics():
    statistics = LengthStatistics(median=230, longest=2048, runaways=0.02)
    trace = generate(statistics, epochs=2, prompts=4000, samples=8, seed=1)
    lengths = trace.response_tokens
    assert np.median(lengths) == pytest.approx(230, rel=0.08)
    assert 0.015 < (lengths == 2048).mean() < 0.035
    before, after = (np.median(lengths[epoch], axis=1) for epoch in (0, 1))
    assert rank_correlation(before, after) > 0.95
    assert (np.abs(before - after) < 50).mean() > 0.7
    assert trace.prompt_tokens.max() <= 1024


def test_a_trace_survives_its_file(tmp_path):
    trace = generate(LengthStatistics(median=50, longest=200), epochs=2, prompts=5, samples=3, seed=0)
    write_trace(tmp_path / "trace.parquet", trace)
    read = read_trace(tmp_path / "trace.parquet")
    assert (read.response_tokens == trace.response_tokens).all() and (read.prompt_tokens == trace.prompt_tokens).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_tokens": [5, -3]}, "response_tokens in .* is -3"),
        ({"epoch": [0, 1]}, "no epoch with all 2 prompts"),
        (None, "no column 'response_tokens'"),
        ({name: [] for name in ("prompt", "epoch", "sample", "prompt_tokens", "response_tokens")}, "is empty"),
    ],
)
def test_a_trace_that_is_none_is_told_why(tmp_path, change, message):
    columns = {"prompt": [0, 1], "epoch": [0, 0], "sample": [0, 0], "prompt_tokens": [9, 9], "response_tokens": [5, 6]}
    if change is None:
        del columns["response_tokens"]
    else:
        columns |= change
    pq.write_table(pa.table({name: pa.array(values, pa.int64()) for name, values in columns.items()}), tmp_path / "t")
    with pytest.raises(ValueError, match=message):
        read_trace(tmp_path / "t")


@pytest.fixture(scope="module")
def small():
    return simulate(SMALL, [0, 1])


def test_the_result_has_every_policy_with_its_spread(small):
    assert [row["policy"] for row in small["policies"]] == list(POLICIES)
    for row in small["policies"]:
        assert set(row) == {"policy", "first_epoch", *METRICS, *(f"{name}_std" for name in METRICS)}
        assert set(row["first_epoch"]) == {"seconds", "gpu_seconds"}
        assert 0 <= row["idle_share"] < 1
        assert 0 < row["lower_bound_share"] <= 1
    assert small["scenario"] == "small" and small["seeds"] == [0, 1]
    assert table(small).row_count == len(POLICIES)


def test_the_same_seeds_give_the_same_numbers(small):
    assert simulate(SMALL, [0, 1]) == small


def test_static_actors_hold_every_gpu_for_the_whole_step(small):
    row = small["policies"][0]
    assert row["policy"] == "static"
    assert row["gpu_seconds"] == pytest.approx(SMALL.gpus * row["seconds"])


def test_ours_with_every_ability_is_cheaper_than_static(small):
    (ours,) = simulate(SMALL, [0, 1], policies=[COMPLETE])["policies"]
    assert ours["gpu_seconds"] < small["policies"][0]["gpu_seconds"]


def test_lengths_are_learnt_from_epoch_to_epoch():
    trace = generate(SMALL.lengths, epochs=2, prompts=24, samples=4, seed=0)
    steps = run_policy(SMALL, POLICIES["rlhfless"], trace, 0)
    assert steps[0].rank_correlation is None
    assert all(step.rank_correlation > 0.5 for step in steps if step.epoch == 1)


def test_a_real_trace_can_be_replayed():
    trace = generate(LengthStatistics(median=40, longest=90), epochs=1, prompts=7, samples=2, seed=5)
    result = simulate(SMALL, [0], policies=["static", "rlhfless"], trace=trace)
    assert [row["policy"] for row in result["policies"]] == ["static", "rlhfless"]


def test_progress_counts_to_the_end():
    seen = []
    simulate(SMALL, [0], policies=["static"], progress=lambda done, total: seen.append((done, total)))
    assert seen == [(k, 4) for k in range(1, 5)]


def test_the_page_shows_every_policy_and_loads_nothing():
    html = scenario_page(dataclasses.replace(SMALL, steps_per_epoch=1), [0], weights=(0.2, 0.8), sizes=(50, 100))
    for name in POLICIES:
        assert f"<h3>{name}</h3>" in html
    for heading in ("Time against cost", "Held and idle", "One step", "The planner&#x27;s own cost"):
        assert heading in html.replace("The planner's", "The planner&#x27;s")
    for state in ("starting", "busy", "idle", "not held"):
        assert re.search(rf'<i class="key [a-z]+"></i>{state}<', html), f"a legend says which color is {state}"
    assert "http" not in html.replace("http-equiv", "")


def test_the_first_scenario_is_the_papers_best_case():
    assert next(iter(SCENARIOS)) == "paper-3b-gsm8k-grpo"
    assert all(scenario.profile().kv_tokens > scenario.lengths.longest for scenario in SCENARIOS.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate("nowhere", [0]), "choose one of paper-3b-gsm8k-grpo"),
        (lambda: simulate(SMALL, []), "seeds is empty"),
        (lambda: simulate(SMALL, [0], policies=["best"]), "policy is 'best'"),
        (lambda: simulate(SMALL, [0], cost_weight=2), "cost_weight is 2.*nearest is 1"),
        (lambda: dataclasses.replace(SMALL, gpus=0), "gpus is 0"),
        (lambda: dataclasses.replace(SMALL, epochs=0), "epochs is 0"),
        (lambda: dataclasses.replace(SMALL, startup_seconds=-1), "startup_seconds is -1"),
    ],
)
def test_what_cannot_be_simulated_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_a_policy_is_told_replaces_that_part_of_what_it_learns() -> None:
    """The parts by which the oracle differs are told one at a time, and each can be measured."""
    scenario = dataclasses.replace(SMALL, max_batch=8, lengths=dataclasses.replace(SMALL.lengths, runaways=0.1))
    trace, ours = scenario.draw_trace(0), find_policy(COMPLETE)

    def steps(*told):
        return run_policy(scenario, dataclasses.replace(ours, told=frozenset(told)), trace, 0)

    def generated(told):
        return [(step.instances, step.moves, step.generation_seconds) for step in steps(*told)]

    assert POLICIES["oracle"].told == {"division", "migration", "arrivals"}
    assert generated(["arrivals"]) == generated([]), "that is told to the learner alone"
    assert [each[0] for each in generated(["migration"])] == [each[0] for each in generated([])]
    assert generated(["division"]) != generated([])


def test_what_is_held_is_started_once_and_paid_all_the_time() -> None:
    scenario = dataclasses.replace(SMALL, startup_seconds=60.0, trainer_start_seconds=60.0)
    first, *later = run_policy(scenario, find_policy(COMPLETE), scenario.draw_trace(0), 0)
    assert all(step.gpu_seconds == pytest.approx(step.instances * step.seconds) for step in later)
    assert first.gpu_seconds == pytest.approx(first.instances * (first.seconds + 120.0))
    assert first.seconds > 60 > max(step.seconds for step in later)
    moving = run_policy(
        scenario, dataclasses.replace(find_policy(COMPLETE), may_hold=False), scenario.draw_trace(0), 0
    )  # fmt: skip
    assert sum(step.gpu_seconds for step in moving[1:]) > sum(step.gpu_seconds for step in later)
