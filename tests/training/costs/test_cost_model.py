"""What a job learns on the way, and what its plans make of it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_functions.api import DecodeCounts, EngineRoom, LearnResult, SampleTask, WeightsReference
from rlhfless_operator.job.actor_range import actor_range
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.planner.acting import Acting
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.calibration import Calibration
from rlhfless_operator.planner.latency.drafting import DraftedLatency
from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.moves.rules import Saving
from rlhfless_operator.planner.pools.contention import ALONE, Contention
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.warming import WINDOW
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.training.actors.generated import GenerationOutcome, Stretch
from rlhfless_operator.training.actors.prepared import PreparationOutcome
from rlhfless_operator.training.costs.cost_model import CostModel
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.costs.prefix_choice import MEASURED, UNABLE

MakeJob = Callable[..., Path]
PROMPT_TOKENS = [5] * 12


def cost_model_of(file: Path) -> CostModel:
    spec = load_job(file).spec
    return CostModel(spec, actor_range(spec))


def test_a_history_keeps_the_newest_values_and_survives_a_restart() -> None:
    history = History()
    for value in range(WINDOW + 3):
        history.add("a", float(value))
    assert history.recent("a") == [float(value) for value in range(3, WINDOW + 3)]
    assert (history.mean("b"), history.mean("b", 7.0)) == (0.0, 7.0)
    restored = History()
    restored.add("a", 99.0)
    restored.restore(json.loads(json.dumps(history.state())))
    assert restored.recent("a") == [*history.recent("a")[1:], 99.0]


def test_a_start_is_timed_from_being_asked_for_until_ready(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job())
    for instance, state, at in (
        ("g-1", "starting", 1.0), ("g-2", "starting", 2.0), ("g-1", "idle", 4.0), ("g-1", "busy", 5.0),
        ("g-2", "ended", 6.0), ("g-1", "idle", 9.0),
    ):  # fmt: skip
        cost_model.instance_changed(StateChange(instance, "generation", state, at))  # type: ignore[arg-type]
    assert cost_model.history.recent("startup/generation") == [3.0]


def test_what_an_instance_takes_to_go_is_timed_from_being_let_go_until_it_is_gone(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job())
    for instance, state, at in (
        ("g-1", "draining", 1.0), ("g-2", "draining", 2.0), ("g-2", "busy", 2.5), ("g-1", "ended", 32.0),
        ("g-2", "ended", 40.0),
    ):  # fmt: skip
        cost_model.instance_changed(StateChange(instance, "generation", state, at))  # type: ignore[arg-type]
    assert cost_model.history.recent("draining/generation") == [31.0]


def test_what_is_learnt_is_part_of_the_checkpoint(tiny_job: MakeJob) -> None:
    first = cost_model_of(tiny_job())
    outcome = GenerationOutcome(sinks=[], lengths={(0, 0): 8, (0, 1): 24}, tokens=32, pauses=[0.7])
    outcome.has_room(EngineRoom(sequences=3, kv_tokens=900))
    outcome.stretches.append(Stretch({(0, 0): 0, (0, 1): 4}, {(0, 0): 8, (0, 1): 24}, 2.0))
    first.generated(outcome, PreparationOutcome(seconds=4.2, loads=[3.0, 5.0]), PROMPT_TOKENS)
    first.measured({0: [8, 24]}, PROMPT_TOKENS)
    weights = WeightsReference(version=1, uri="w")
    first.learned(LearnResult(weights=weights, metrics={"seconds": 3.0, "seconds/train": 2.0}))
    assert first.history.mean("preparation/token") == pytest.approx(4.2 / 42)
    assert first.history.mean("preparation/load") == 4.0
    assert first.restart_seconds(2) == 4.0

    second = cost_model_of(tiny_job())
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    plans = [each.plan([0, 1, 2], 4, PROMPT_TOKENS, known=True) for each in (first, second)]
    assert plans[0].shares == plans[1].shares
    assert plans[0].estimates[0].runaways > 0, "a truncated response is a runaway"


def test_plans_and_moves_keep_to_what_instances_have_room_for(tiny_job: MakeJob) -> None:
    planning = {"policy": "cost", "migration": {"policy": "benefit"}}
    cost_model = cost_model_of(tiny_job(planning=planning, generation={"instances": {"min": 1, "max": 1}}))
    seconds = []
    for room in (None, EngineRoom(sequences=48, kv_tokens=10**6), EngineRoom(sequences=12, kv_tokens=10**6)):
        cost_model.room = room
        plan = cost_model.plan(range(12), 4, PROMPT_TOKENS, known=True)
        seconds.append(plan.planned.expected_generation_seconds)
    rule = cost_model.open_migration(plan)._rule
    assert isinstance(rule, Saving) and (rule.slots, rule.kv_tokens) == (12, 10**6)
    assert seconds[0] == pytest.approx(seconds[1])
    assert seconds[2] > 1.5 * seconds[1], "48 samples are four batches of 12"


def test_a_plan_counts_the_time_that_its_longest_response_is_with_its_environment(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job())
    before = cost_model.plan(range(4), 4, PROMPT_TOKENS, known=True)
    cost_model.history.add("environment/token", 0.5)
    after = cost_model.plan(range(4), 4, PROMPT_TOKENS, known=True)
    away = 0.5 * max(load.expected_tokens for share in after.planned.generation.shares for load in share.samples)
    assert away > 0
    for name in ("expected_generation_seconds", "expected_seconds"):
        assert getattr(after.planned, name) == pytest.approx(getattr(before.planned, name) + away, rel=0.05)


def test_time_with_environments_is_that_of_the_prompts_own_samples(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job())
    cost_model.history.add("environment/token", 0.5)
    outcome = GenerationOutcome(sinks=[], acting={(2, 0): Acting(400.0, 30.0), (2, 1): Acting(600.0, 50.0)})
    cost_model.generated(outcome, PreparationOutcome(), PROMPT_TOKENS)
    again = cost_model_of(tiny_job())
    again.restore(cost_model.state())
    for model in (cost_model, again):
        assert model.acting.predict(2, 10.0) == Acting(500.0, 40.0)
        assert model.acting.predict(3, 10.0) == Acting(5.0, 0.0), "by its tokens"
        planned = model.plan(range(4), 4, PROMPT_TOKENS, known=True).planned
        assert planned.expected_generation_seconds > 500
        assert planned.groups is None or max(planned.groups.ready, key=planned.groups.ready.get) == 2


def test_a_plan_has_what_an_environment_gives_in_its_samples_contexts(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job())
    before = cost_model.plan(range(4), 4, PROMPT_TOKENS, known=True)
    cost_model.history.add("environment/given_token", 3.0)
    after = cost_model.plan(range(4), 4, PROMPT_TOKENS, known=True)

    def loads(plan: GenerationPlan) -> dict[tuple[int, int], SampleLoad]:
        return {(load.prompt, load.index): load for share in plan.planned.generation.shares for load in share.samples}

    for place, load in loads(after).items():
        given = round(3 * load.expected_tokens)
        assert given > 0 and load.prompt_tokens == loads(before)[place].prompt_tokens + given
        assert load.expected_tokens == loads(before)[place].expected_tokens
    assert after.planned.expected_generation_seconds > before.planned.expected_generation_seconds


def test_the_least_room_of_all_instances_counts() -> None:
    outcome = GenerationOutcome(sinks=[])
    outcome.has_room(EngineRoom(sequences=8, kv_tokens=100))
    outcome.has_room(EngineRoom(sequences=16, kv_tokens=50))
    assert outcome.room == EngineRoom(sequences=8, kv_tokens=50)


def test_what_sharing_prefixes_saved_is_measured(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job())
    cost_model.calibration = Calibration(LinearLatency(step_seconds=0.1, prefill_token_seconds=0.01))
    told = {"tokens_sent": 500.0, "tokens_fetched": 1000.0, "seconds_sent": 1.0, "seconds_fetched": 2.0}
    outcome = GenerationOutcome(sinks=[], shares_prefixes=True)
    outcome.prefixes.update({**told, "seconds_waited": 4.0})
    cost_model.generated(outcome, PreparationOutcome(), PROMPT_TOKENS)
    assert cost_model.history.recent(MEASURED) == [pytest.approx(1000 * 0.01 - 1 - 2 - 4)]
    tree = {"block_tokens": 4, "parents": [-1], "nodes": [0, 0]}
    shares = [[SampleTask(prompt=row, index=0)] for row in range(2)]
    sharing = cost_model.share_prefixes(tree, shares, [5, 5], in_store=True)
    # One prefix of 4 tokens, which the other would wait for: 5 and 5 tokens, or 5, 0.008 and 0.1 and 0.008 s.
    assert sharing.gain_seconds == 0.0
    always = cost_model_of(tiny_job(generation={"sharePrefixes": "always"}))
    told_of = always.share_prefixes(tree, shares, [5, 5], in_store=True).of("actor-0000", shares[0], "folder")
    assert told_of is not None


def test_an_engine_that_says_nothing_of_prefixes_can_share_none(tiny_job: MakeJob) -> None:
    stretch = Stretch({(0, 0): 0}, {(0, 0): 8}, 2.0)
    for asked, stretches, told, unable in (
        (True, [stretch], {}, True),
        (False, [stretch], {}, False),
        (True, [], {}, False),
        (True, [stretch], {"tokens_sent": 0.0}, False),
    ):
        cost_model = cost_model_of(tiny_job())
        outcome = GenerationOutcome(sinks=[], shares_prefixes=asked, stretches=stretches)
        outcome.prefixes.update(told)
        cost_model.generated(outcome, PreparationOutcome(), PROMPT_TOKENS)
        assert bool(cost_model.history.recent(UNABLE)) == unable


def test_prompts_of_another_dataset_get_the_prior(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job())
    cost_model.measured({0: [4, 4], 1: [20, 20]}, PROMPT_TOKENS)
    plan = cost_model.plan([0, 1], 1, PROMPT_TOKENS, known=False)
    assert plan.estimates[0] == plan.estimates[1]


def test_the_plan_of_a_step_knows_what_comes_after_generation(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job(planning={"policy": "cost"}))
    bare = cost_model.plan([0, 1, 2], 4, PROMPT_TOKENS, known=True)
    cost_model.history.add("learning", 10.0)
    cost_model.history.add("preparation/token", 0.01)
    whole = cost_model.plan([0, 1, 2], 4, PROMPT_TOKENS, known=True)
    assert whole.planned.expected_seconds > bare.planned.expected_seconds + 10
    dealt = [sample for share in whole.shares for sample in share]
    assert sorted((sample.prompt, sample.index) for sample in dealt) == [(p, i) for p in range(3) for i in range(4)]
    assert all(isinstance(sample, SampleTask) for sample in dealt)


def test_a_plan_is_charged_each_learner_of_a_gang(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job(planning={"policy": "cost"}))
    cost_model.history.add("learning", 8.0)
    paid = []
    for learners in (1, 4):
        whole = cost_model.plan([0, 1], 4, PROMPT_TOKENS, known=True, learning_instances=learners).planned.whole
        assert whole is not None
        paid.append(whole.expected_gpu_seconds)
    assert paid[1] - paid[0] == pytest.approx(3 * 8.0)


def test_a_learner_that_waited_has_not_taken_that_long(tiny_job: MakeJob) -> None:
    cost_model = cost_model_of(tiny_job(planning={"policy": "cost"}))
    plan = cost_model.plan([0, 1, 2], 4, PROMPT_TOKENS, known=True, follows=True).planned
    assert plan.groups is None, "nothing is known of learning"
    metrics = {"seconds": 13.5, "seconds/train": 2.0, "seconds/wait": 6.0, "tokens": 150.0, "tokens/shared": 50.0}
    # It loaded its state before it began, beside the rollout that it followed.
    metrics["seconds/load"] = 4.5
    cost_model.learned(LearnResult(weights=WeightsReference(version=1, uri="w"), metrics=metrics))
    assert cost_model.history.mean("learning") == pytest.approx(7.5)
    assert cost_model.history.mean("learning/token") == pytest.approx(2.0 / 200)
    assert cost_model.history.mean("learning/rest") == pytest.approx(1.0)
    plan = cost_model.plan([0, 1, 2], 4, PROMPT_TOKENS, known=True, follows=True).planned
    assert plan.groups is not None and set(plan.groups.ready) == {0, 1, 2}
    assert max(plan.groups.ready.values()) < plan.expected_seconds - 1.0
    assert all(seconds > 0 for seconds in plan.groups.learning.values())
    assert cost_model.plan([0, 1, 2], 4, PROMPT_TOKENS, known=True).planned.groups is None


def test_the_warm_up_of_a_learner_is_not_counted_against_its_number_of_instances(tiny_job: MakeJob) -> None:
    learning = {"processes": 1, "instances": {"min": 1, "max": 2}}
    cost_model = cost_model_of(tiny_job(planning={"policy": "cost"}, learning=learning))

    def learned(count: int, train: float, load: float | None = None) -> None:
        metrics = {"seconds": train + 1.0 + (load or 0.0), "seconds/train": train, "tokens": 100.0}
        metrics |= {"learning/instances": float(count)} | ({} if load is None else {"seconds/load": load})
        cost_model.learned(LearnResult(weights=WeightsReference(version=1, uri="w"), metrics=metrics))

    learned(2, 60.0, load=9.0)
    learned(2, 20.0)
    assert not cost_model.learner_scaling([2])[2].known
    learned(2, 20.0)
    for _ in range(2):
        learned(1, 70.0, load=9.0)
    found = cost_model.learner_scaling([1, 2])
    assert list(found[2].token_seconds) == [0.2, 0.2]
    assert list(found[1].token_seconds) == [0.7, 0.7], "each step with one has a learner of its own"
    assert list(found[1].rest_seconds) == [pytest.approx(1.0)] * 2


def test_dear_starts_mean_fewer_actors(tiny_job: MakeJob) -> None:
    settings = {"planning": {"policy": "cost"}, "generation": {"instances": {"min": 1, "max": 8}}}
    settings |= {"sampling": {"maxResponseTokens": 2000}}
    numbers = []
    for startup in (0.001, 1000.0):
        cost_model = cost_model_of(tiny_job(**settings))
        cost_model.history.add("startup/generation", startup)
        numbers.append(len(cost_model.plan(list(range(12)), 8, PROMPT_TOKENS, known=True).shares))
    assert numbers[0] > numbers[1] == 1


def test_a_plan_leaves_the_gpus_to_others_that_others_want(tiny_job: MakeJob) -> None:
    spec = load_job(
        tiny_job(generation={"instances": {"min": 1, "max": 8}}, planning={"policy": "cost", "lambda": 0.0})
    ).spec
    contention = [ALONE]
    cost_model = CostModel(spec, actor_range(spec), lambda: contention[0])

    def actors() -> int:
        plan = cost_model.plan(list(range(12)), 4, PROMPT_TOKENS, known=True)
        assert sorted((each.prompt, each.index) for share in plan.shares for each in share) == [
            (prompt, index) for prompt in range(12) for index in range(4)
        ]
        assert plan.wanted_by_others == contention[0].wanted
        return len(plan.shares)

    alone = actors()
    assert alone > 3
    contention[0] = Contention(0.2, 3)
    assert 1 < actors() <= 3
    contention[0] = Contention(1.0, 8)
    assert actors() == 1, "where all GPUs are always wanted, GPU-seconds count"
    contention[0] = ALONE
    assert actors() == alone


def test_the_least_that_a_job_asks_for_is_not_taken_from_it(tiny_job: MakeJob) -> None:
    spec = load_job(tiny_job(generation={"instances": {"min": 3, "max": 8}}, planning={"policy": "cost"})).spec
    cost_model = CostModel(spec, actor_range(spec), lambda: Contention(1.0, 1))
    assert len(cost_model.plan(list(range(12)), 4, PROMPT_TOKENS, known=True).shares) == 3


def test_new_weights_are_loaded_before_anything_is_generated_and_are_paid(tiny_job: MakeJob) -> None:
    def planned(loading: float) -> tuple[float, float, float]:
        cost_model = cost_model_of(tiny_job(planning={"policy": "cost", "lambda": 1.0}))
        outcome = GenerationOutcome([], weights_seconds=loading)
        cost_model.generated(outcome, PreparationOutcome(), PROMPT_TOKENS)
        plan = cost_model.plan([0, 1, 2, 3], 4, PROMPT_TOKENS, known=True).planned
        return plan.expected_seconds, plan.expected_generation_seconds, plan.generation.expected_instance_seconds

    without, loaded = planned(0.0), planned(7.0)
    assert [after - before for before, after in zip(without, loaded, strict=True)] == pytest.approx([7.0] * 3)


def drafted_step(passes: int, tokens: int, sequences: int, latency: LinearLatency) -> GenerationOutcome:
    """An instance that drafted 8 tokens for each of its sequences in each pass."""
    lengths = {(prompt, 0): tokens for prompt in range(sequences)}
    counts = DecodeCounts(
        passes=passes,
        sequence_passes=passes * sequences,
        tokens=tokens * sequences,
        drafted=8 * passes * sequences,
        accepted=(tokens - passes) * sequences,
        judged=tokens * sequences,
        looked_up=passes * sequences,
        matched=passes * sequences * 3 // 4,
    )
    context = sequences * passes * (5 + tokens / 2)
    seconds = latency.step_seconds * passes + latency.sequence_seconds * sequences * passes
    seconds += latency.context_seconds * context + latency.draft_seconds * counts.drafted
    seconds += latency.prefill_token_seconds * 5 * sequences
    outcome = GenerationOutcome(sinks=[], lengths=lengths, tokens=tokens * sequences)
    outcome.has_room(EngineRoom(sequences=64, kv_tokens=10**6, longest_draft=15))
    outcome.stretches.append(Stretch(dict.fromkeys(lengths, 0), lengths, seconds, counts))
    outcome.decoded(counts)
    return outcome


def test_plans_learn_from_drafts_how_many_passes_there_will_be(tiny_job: MakeJob) -> None:
    real = LinearLatency(0.02, 0.0005, 1e-7, 1e-5, 0.0004)
    cost_model = cost_model_of(tiny_job(planning={"policy": "cost"}))
    for passes, tokens, sequences in ((40, 120, 4), (40, 100, 12), (60, 200, 1), (10, 40, 8), (30, 60, 2)) * 4:
        outcome = drafted_step(passes, tokens, sequences, real)
        cost_model.generated(outcome, PreparationOutcome(), PROMPT_TOKENS)
    # Passes are as long as they are, however many tokens each gave.
    assert cost_model.calibration.latency.decode_seconds(1, 50) == pytest.approx(real.decode_seconds(1, 50), rel=0.1)
    learnt = cost_model.latency
    assert isinstance(learnt, DraftedLatency)
    assert learnt.drafts.coverage == pytest.approx(0.75, abs=0.01)
    assert 0.6 < learnt.drafts.acceptance < 0.75
    assert learnt.decode_seconds(1, 50) < 0.6 * real.decode_seconds(1, 50)

    resumed = cost_model_of(tiny_job(planning={"policy": "cost"}))
    resumed.restore(json.loads(json.dumps(cost_model.state())))
    assert resumed.latency == learnt
    plans = [each.plan(range(12), 4, PROMPT_TOKENS, known=True) for each in (cost_model, resumed)]
    assert plans[0].shares == plans[1].shares
    cost_model.room = EngineRoom(sequences=64, kv_tokens=10**6)
    plain = cost_model.plan(range(12), 4, PROMPT_TOKENS, known=True)
    assert plain.planned.expected_generation_seconds > plans[0].planned.expected_generation_seconds


def test_the_bound_of_a_run_holds_however_well_others_draft(tiny_job: MakeJob) -> None:
    """It rests on no acceptance: a step whose drafts are all right, where most were wrong before, is not below it."""
    real = LinearLatency(0.02, 0.0005, 1e-7, 1e-5, 0.0004)
    cost_model = cost_model_of(tiny_job())
    for passes, tokens, sequences in ((110, 120, 4), (95, 100, 12), (190, 200, 1), (39, 40, 8), (58, 60, 2)) * 4:
        cost_model.generated(drafted_step(passes, tokens, sequences, real), PreparationOutcome(), PROMPT_TOKENS)
    lucky = drafted_step(25, 200, 3, real)
    seconds = lucky.stretches[0].seconds
    bound = cost_model.lower_bound(lucky, PROMPT_TOKENS, seconds)
    assert bound is not None and 0 < bound <= seconds


def test_a_checkpoint_takes_as_long_to_load_as_to_save_before_one_was_loaded(tiny_job: MakeJob) -> None:
    costs = cost_model_of(tiny_job())
    assert costs.taking_up_seconds(3) == 0.0
    costs.history.add("learning/train", 2.0)
    costs.taken_up(1.0)
    assert costs.taking_up_seconds(3) == 7.0
    costs.saved(4.0)
    assert costs.taking_up_seconds(0) == 4.0
    for _ in range(40):
        costs.taken_up(5.0)
    assert costs.taking_up_seconds(0) == 5.0
