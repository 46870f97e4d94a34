"""Prices by stage, by accelerator and for spot, and the GPUs of an instance, by a document and by default pods."""

from decimal import Decimal
from typing import Any

import pytest

from rlhfless_operator.job.instance_prices import SPOT_LABELS
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.reading.validation import InvalidJobError, parse_content
from rlhfless_operator.job.spec import RLHFJob
from tests.jobs import job

H100 = {"nodeSelector": {"nvidia.com/gpu.product": "H100"}}
L40S = {"nodeSelector": {"nvidia.com/gpu.product": "L40S"}}
SPOT = {"nodeSelector": {"karpenter.sh/capacity-type": "spot"}}
TABLE = {"H100": "4.00", "L40S": "1.50"}


def gpus(count: int | str) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": count, "cpu": "8"}}}


def prices(**spec: Any) -> tuple[Decimal, ...]:
    """Of generation, preparation and learning."""
    return tuple(job(**spec).spec.instance_prices.values())


def told(**spec: Any) -> tuple[str, str]:
    """The one fault of a document: its field and its words."""
    content = job().model_dump(mode="json", by_alias=True, exclude_none=True)
    content["spec"] |= spec
    with pytest.raises(InvalidJobError) as caught:
        parse_content(content, source="job.yaml")
    (fault,) = caught.value.faults
    return fault.path, f"{fault.message}; {fault.remedy}"


def amounts(*written: str) -> tuple[Decimal, ...]:
    return tuple(map(Decimal, written))


def test_without_more_each_instance_has_the_same_price() -> None:
    assert prices(prices={"instanceHour": "2.50"}) == amounts("2.50", "2.50", "2.50")
    assert prices() == amounts("0", "0", "0")


def test_what_is_said_of_a_stage_counts_first() -> None:
    own = {"instanceHour": "2.50", "stages": {"preparation": "0.10"}, "accelerators": {"H100": "4.00"}}
    assert prices(prices=own) == amounts("4.00", "0.10", "4.00")


def test_an_accelerator_is_told_by_the_node_selector_of_the_stage_or_of_the_job() -> None:
    pods = {"generation": {"pods": L40S}, "pods": H100}
    assert prices(prices={"accelerators": TABLE}, **pods) == amounts("1.50", "4.00", "4.00")


def test_an_instance_costs_as_much_as_all_of_its_accelerators() -> None:
    stages = {"generation": {"pods": gpus(2)}, "learning": {"pods": gpus("8")}}
    own = {"instanceHour": "0.20", "accelerators": {"H100": "4.00"}}
    assert prices(prices=own, **stages) == amounts("8.00", "0.20", "32.00"), "one without any costs what instances do"


def test_on_spot_an_accelerator_has_its_price_there() -> None:
    own = {"accelerators": {"H100": "4.00"}, "spot": {"H100": "1.60"}}
    assert prices(prices=own, generation={"pods": SPOT}) == amounts("1.60", "4.00", "4.00")


@pytest.mark.parametrize(("label", "value"), SPOT_LABELS.items())
def test_the_labels_of_every_cloud_are_known(label: str, value: str) -> None:
    assert prices(prices={"spot": {"H100": "1.60"}}, pods={"nodeSelector": {label: value}})[0] == Decimal("1.60")


def test_a_rehearsal_has_the_accelerators_that_it_emulates() -> None:
    rehearsal = {"trace": "t.parquet", "gpu": "L40S", "gpus": 2}
    spec = job(prices={"accelerators": TABLE}, rehearsal=rehearsal).spec
    assert set(spec.instance_prices.values()) == {Decimal("3.00")}
    assert set(spec.instance_gpus.values()) == {2}


def test_the_learner_of_a_rehearsal_costs_as_much_as_the_gpus_that_make_it_fast() -> None:
    rehearsal = {"trace": "t.parquet", "gpu": "L40S", "gpus": 2}
    spec = job(prices={"accelerators": TABLE}, rehearsal=rehearsal, learning={"processes": 8}).spec
    assert spec.instance_gpus == {"generation": 2, "preparation": 2, "learning": 8}
    assert spec.instance_prices["learning"] == Decimal("12.00")


def test_gpus_are_those_that_pods_ask_for_and_else_those_that_the_settings_need() -> None:
    asked = job(generation={"pods": gpus(2)}, learning={"pods": gpus(4)}).spec.instance_gpus
    assert asked == {"generation": 2, "preparation": 0, "learning": 4}
    needed = job(generation={"vllm": {"tensorParallelSize": 2}}, learning={"processes": 4}).spec.instance_gpus
    assert needed == {"generation": 2, "preparation": 1, "learning": 4}
    assert set(job().spec.instance_gpus.values()) == {1}


def test_the_default_pods_of_a_cluster_count_too() -> None:
    made = job(prices={"accelerators": {"H100": "4.00"}}, learning={"pods": gpus(4)}, preparation={"pods": gpus(0)})
    on_cluster = made.on_cluster(PodsSpec.model_validate(gpus(8)))
    assert on_cluster.spec.instance_gpus == {"generation": 8, "preparation": 0, "learning": 4}
    assert tuple(on_cluster.spec.instance_prices.values()) == amounts("32.00", "0", "16.00")
    assert on_cluster.model_dump() == made.model_dump(), "the document is the same"
    assert made.spec.instance_gpus == {"generation": 0, "preparation": 0, "learning": 4}


def test_an_accelerator_that_is_not_known_is_an_error_with_the_remedy() -> None:
    field, words = told(prices={"accelerators": TABLE}, generation={"pods": H100}, preparation={"pods": L40S})
    assert field == "spec.prices.accelerators"
    assert "nothing says which of H100, L40S learning runs on" in words
    assert "learning.pods.nodeSelector" in words
    assert "set prices.stages.learning" in words


def test_spot_capacity_without_a_price_is_an_error_with_the_remedy() -> None:
    field, words = told(prices={"accelerators": {"H100": "4.00"}}, learning={"pods": SPOT})
    assert field == "spec.prices.spot"
    assert "learning runs on H100 on spot capacity (karpenter.sh/capacity-type: spot), which has no price" in words


def test_what_has_a_price_on_spot_alone_can_not_run_on_demand() -> None:
    field, words = told(prices={"spot": {"H100": "4.00"}})
    assert field == "spec.prices.accelerators"
    assert "generation runs on H100 on demand, which has no price; add H100 here" in words


@pytest.mark.parametrize("price", [4.0, "four", "-1"])
def test_a_price_that_is_none_names_its_accelerator(price: Any) -> None:
    field, words = told(prices={"accelerators": {"H100": price}})
    assert field == "spec.prices.accelerators.H100"
    assert 'such as "2.50"' in words


@pytest.mark.parametrize(
    ("budget", "field", "words"),
    [
        ({}, "spec.budget", "write money, gpuHours or both"),
        ({"money": "0"}, "spec.budget.money", 'write more than "0"'),
        ({"money": "-5"}, "spec.budget.money", "'-5' is not a price"),
        ({"money": 5}, "spec.budget.money", "in quotes"),
        ({"gpuHours": 0}, "spec.budget.gpuHours", "write more than 0"),
        ({"gpuHours": -1.5}, "spec.budget.gpuHours", "write more than 0"),
        ({"gpuHours": "100"}, "spec.budget.gpuHours", "remove the quotes"),
        ({"hours": 3}, "spec.budget.hours", "gpuHours"),
    ],
)
def test_a_budget_that_is_none_is_an_error_with_the_remedy(budget: Any, field: str, words: str) -> None:
    found, text = told(budget=budget, prices={"instanceHour": "1"})
    assert found == field
    assert words in text


def test_money_without_prices_is_no_budget() -> None:
    field, words = told(budget={"money": "5"})
    assert field == "spec.budget.money"
    assert "no instance has a price" in words
    assert isinstance(job(budget={"gpuHours": 5}), RLHFJob)
