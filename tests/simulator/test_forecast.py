"""The forecast before money is spent."""

import dataclasses
import json
import re
from decimal import Decimal

import numpy as np
import pytest

from rlhfless_operator.planner.latency.devices import find_profile, model_shape
from rlhfless_operator.planner.latency.roofline import LLAMA_70B, QWEN_3B, QWEN_7B
from rlhfless_operator.planner.step.chunks import CHUNKS_PER_STEP
from rlhfless_operator.planner.step.planning import InfeasibleError, Limits
from rlhfless_operator.simulator.forecast import WEIGHTS, Forecast, Others, typical_step
from rlhfless_operator.simulator.traces import LengthStatistics, RecordedTrace, TraceStep, generate
from rlhfless_operator.training.costs.model_shape import find_shape, read_model_shape

QWEN_7B_CONFIG = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_models_shape_is_counted_from_its_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B_CONFIG))
    shape = read_model_shape(tmp_path)
    assert shape.parameters == pytest.approx(QWEN_7B.parameters, rel=0.01)
    assert (shape.kv_bytes, shape.layers) == (QWEN_7B.kv_bytes, QWEN_7B.layers)


def a_forecast(**changes):
    samples = typical_step(LengthStatistics(median=200, longest=2048), prompts=64, samples=8, longest=2048)
    away = changes.pop("away", 0.0)
    samples = [dataclasses.replace(each, away_seconds=away * each.expected_tokens) for each in samples]
    others = Others(seconds=10, gpu_seconds=12)
    arguments = {"limits": Limits(max_instances=8, max_batch=256), "instance_hour": Decimal("3.77"), "others": others}
    return Forecast(samples, find_profile(QWEN_3B, "L40S", 1, startup_seconds=2), **arguments | changes)


def test_more_weight_on_cost_is_slower_and_cheaper():
    forecast = a_forecast()
    plans, front = [forecast.weighted(weight) for weight in WEIGHTS], forecast.front()
    assert [row["seconds"] for row in plans] == sorted(row["seconds"] for row in plans)
    costs = [Decimal(row["cost"]) for row in plans]
    assert costs == sorted(costs, reverse=True)
    for row in plans + front:
        assert row["lower_bound_gpu_seconds"] <= row["gpu_seconds"]
        assert row["seconds"] == pytest.approx(row["generation_seconds"] + 10)
        assert Decimal(row["cost"]) == pytest.approx(Decimal(row["gpu_seconds"] * 3.77 / 3600), abs=Decimal("1e-4"))


@pytest.mark.parametrize("learning", [1, 8, 40])
def test_a_learner_that_works_beside_generation_ends_a_step_sooner(learning):
    after = Others(seconds=2 + learning, gpu_seconds=12)
    beside = dataclasses.replace(after, beside=learning)
    later, sooner = a_forecast(others=after), a_forecast(others=beside)
    for row in sooner.front():
        # The last chunk is learnt after generation, and no learning is faster than the learner.
        least = max(row["generation_seconds"] + learning / CHUNKS_PER_STEP, learning) + 2
        assert least - 1e-9 <= row["seconds"] <= row["generation_seconds"] + learning + 2
    assert sooner.within_deadline(1e9)["gpu_seconds"] == later.within_deadline(1e9)["gpu_seconds"]
    without, ahead = sooner.ahead(0.5, [1])
    assert without["seconds"] < later.ahead(0.5, [])[0]["seconds"]
    assert without["seconds"] >= ahead["seconds"] * 0.95
    assert without["learning_busy"] <= 1


def test_a_learner_that_waits_for_preparation_ends_no_later_than_one_that_waits_for_all():
    others = Others(seconds=12, gpu_seconds=90, preparation=80)
    slow, fast = (
        a_forecast(others=dataclasses.replace(others, beside=10), preparers=(1, most)).weighted(0) for most in (1, 16)
    )
    assert fast["seconds"] < slow["seconds"] <= slow["generation_seconds"] + 12


def test_preparation_has_as_many_instances_as_hold_up_no_other_stage():
    others = Others(seconds=10, gpu_seconds=90, preparation=80)
    found = {most: a_forecast(others=others, preparers=(1, most)).ahead(0.5, [1]) for most in (1, 3, 64)}
    assert [[row["preparers"] for row in rows] for rows in found.values()][:2] == [[1, 1], [3, 3]]
    assert found[1][1]["seconds"] == pytest.approx(80, rel=0.05), "one instance is what all others wait for"
    assert found[3][1]["seconds"] == pytest.approx(80 / 3, rel=0.05)
    assert found[1][1]["preparers_reason"].endswith("would be needed")
    without = a_forecast(others=Others(seconds=10, gpu_seconds=90)).ahead(0.5, [1])
    assert found[64][1]["preparers"] < 16
    assert found[64][1]["seconds"] == pytest.approx(without[1]["seconds"], rel=0.2)


def test_a_step_is_longer_by_what_its_longest_response_is_away_and_its_actors_are_held():
    here, away = a_forecast().weighted(0), a_forecast(away=0.1).weighted(0)
    seconds = away["seconds"] - here["seconds"]
    assert seconds == pytest.approx(0.1 * 2048, rel=0.05), "the longest response ends last in any case"
    assert away["generation_seconds"] - here["generation_seconds"] == pytest.approx(seconds)
    assert away["actors"] == here["actors"]
    assert away["gpu_seconds"] - here["gpu_seconds"] > 0.5 * here["actors"] * seconds


def test_learning_beside_generation_waits_for_groups_that_are_away():
    others = Others(seconds=12, gpu_seconds=12, beside=10)
    rows = [a_forecast(others=others, away=away).within_deadline(1e9) for away in (0.0, 0.1)]
    assert rows[1]["seconds"] > rows[0]["seconds"] + 1


def test_a_deadline_gives_the_cheapest_plan_and_a_budget_the_fastest():
    forecast = a_forecast()
    front = forecast.front()
    assert len(front) > 2
    for row in front[1:-1]:
        cheapest = forecast.within_deadline(row["seconds"] + 1e-6)
        assert cheapest["seconds"] <= row["seconds"] + 1e-6
        assert cheapest["gpu_seconds"] <= row["gpu_seconds"] * 1.005
        fastest = forecast.within_budget(Decimal(row["cost"]) + Decimal("0.0001"))
        assert Decimal(fastest["cost"]) <= Decimal(row["cost"]) + Decimal("0.0001")
        assert fastest["seconds"] <= row["seconds"] * 1.05


def test_what_cannot_be_met_is_told_with_the_nearest_that_can():
    forecast = a_forecast()
    with pytest.raises(InfeasibleError, match=r"deadline is 5 s: .* takes (\d+\.\d) s a step") as error:
        forecast.within_deadline(5)
    least = float(re.search(r"takes (\S+) s a step", str(error.value))[1])
    assert forecast.within_deadline(least + 0.1)["seconds"] <= least + 0.1
    with pytest.raises(InfeasibleError, match=r"budget is 0\.001: the cheapest plan costs") as error:
        forecast.within_budget(Decimal("0.001"))
    least_cost = Decimal(re.search(r"costs (\S+) a step", str(error.value))[1])
    assert Decimal(forecast.within_budget(least_cost)["cost"]) <= least_cost
    with pytest.raises(ValueError, match=r"lambda is 1\.5: .* the nearest is 1"):
        forecast.weighted(1.5)
    with pytest.raises(ValueError, match="instances cost nothing"):
        a_forecast(instance_hour=Decimal(0)).within_budget(Decimal(1))


def test_a_step_is_drawn_from_the_last_visits_of_a_trace():
    trace = generate(LengthStatistics(median=50, longest=100), epochs=3, prompts=10, samples=4, seed=0)
    step = typical_step(trace, prompts=10, samples=4, longest=80)
    assert sorted(each.expected_tokens for each in step) == sorted(np.minimum(trace.response_tokens[-1], 80).ravel())
    assert len(typical_step(trace, prompts=30, samples=2, longest=80)) == 60
    recorded = RecordedTrace(np.array([5, 6]), [TraceStep(0, {0: [1, 1], 1: [2, 2]}), TraceStep(1, {0: [9, 9]})])
    drawn = typical_step(recorded, prompts=2, samples=2, longest=80)
    assert sorted((each.prompt_tokens, each.expected_tokens) for each in drawn) == [(5, 9), (5, 9), (6, 2), (6, 2)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_profile(QWEN_3B, "B300", 1, startup_seconds=1), "gpu is 'B300': choose one of L40S, A100"),
        (lambda: find_profile(QWEN_3B, "L40S", 0, startup_seconds=1), "gpus is 0"),
        (lambda: find_profile(LLAMA_70B, "L40S", 1, startup_seconds=1), "use at least 4"),
        (lambda: model_shape("m", {"hidden_size": 4}), "num_hidden_layers is not in the model's configuration"),
    ],
)
def test_what_cannot_be_forecast_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_is_known_by_its_name_or_by_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B_CONFIG))
    assert find_shape("Qwen/Qwen2.5-7B-Instruct") == QWEN_7B
    assert find_shape(str(tmp_path)).layers == QWEN_7B.layers
    with pytest.raises(ValueError, match=r"model\.source is 'nobody/model', which is no folder here, .* Qwen2\.5-3B"):
        find_shape("nobody/model")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config.json is missing"):
        read_model_shape(tmp_path)
