"""The forecast before money is spent."""

import json
from decimal import Decimal

import pytest

from rlhfless_operator.devices import find_profile, find_shape, model_shape, read_model_shape
from rlhfless_operator.policy.planning import Limits
from rlhfless_operator.policy.roofline import LLAMA_70B, QWEN_3B, QWEN_7B
from rlhfless_operator.simulator.forecast import forecast
from rlhfless_operator.simulator.traces import LengthStatistics

QWEN_7B_CONFIG = {
    "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_models_shape_is_counted_from_its_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B_CONFIG))
    shape = read_model_shape(tmp_path)
    assert shape.parameters == pytest.approx(QWEN_7B.parameters, rel=0.01)
    assert (shape.kv_bytes, shape.layers) == (QWEN_7B.kv_bytes, QWEN_7B.layers)


def test_more_weight_on_cost_is_slower_and_cheaper():
    found = forecast(
        find_profile(QWEN_3B, "L40S", 1, startup_seconds=2),
        LengthStatistics(median=200, longest=2048),
        prompts_per_step=64,
        samples_per_prompt=8,
        limits=Limits(max_instances=8, max_batch=256),
        instance_hour=Decimal("3.77"),
    )
    plans = found["plans"]
    assert [row["seconds"] for row in plans] == sorted(row["seconds"] for row in plans)
    costs = [Decimal(row["cost"]) for row in plans]
    assert costs == sorted(costs, reverse=True)
    for row in plans + found["front"]:
        assert row["lower_bound_instance_seconds"] <= row["instance_seconds"]
        assert Decimal(row["cost"]) == pytest.approx(
            Decimal(row["instance_seconds"] * 3.77 / 3600), abs=Decimal("1e-4")
        )


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
    with pytest.raises(ValueError, match=r"model\.source is 'nobody/model', which is no folder here: .* Qwen2\.5-3B"):
        find_shape("nobody/model")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config.json is missing"):
        read_model_shape(tmp_path)
