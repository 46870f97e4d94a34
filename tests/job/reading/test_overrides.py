"""`--set`: values of a document from the command line."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.job.reading.validation import InvalidJobError, load_job, parse_job
from tests.job.good_document import GOOD


def said(*settings: str) -> str:
    with pytest.raises(InvalidJobError) as caught:
        parse_job(GOOD, "job.yaml", settings=settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "read", "value"),
    [
        ("spec.steps=5", lambda spec: spec.steps, 5),
        ("spec.rewards.0.weight=2", lambda spec: spec.rewards[0].weight, 2.0),
        ("spec.optimizer.learningRate=1e-5", lambda spec: spec.optimizer.learning_rate, 1e-5),
        ("spec.sampling.stop=[a, b]", lambda spec: spec.sampling.stop, ["a", "b"]),
        ("spec.learning.pack=never", lambda spec: spec.learning.pack, "never"),
        ("spec.algorithm={name: rloo}", lambda spec: spec.algorithm.name, "rloo"),
        ("spec.model.source=a=b", lambda spec: spec.model.source, "a=b"),
        ("spec.model.lora=", lambda spec: spec.model.lora, None),
        ("spec.limits.stall=90s", lambda spec: spec.limits.stall, 90.0),
        ("spec.budget.money=0.0012", lambda spec: spec.budget.money, Decimal("0.0012")),
        ("spec.budget.money= 2.50", lambda spec: spec.budget.money, Decimal("2.50")),
        ("spec.budget.money='2.50'", lambda spec: spec.budget.money, Decimal("2.50")),
        ("spec.budget={money: '2.50'}", lambda spec: spec.budget.money, Decimal("2.50")),
        ("spec.prices.instanceHour=0.10", lambda spec: spec.prices.instance_hour, Decimal("0.10")),
        ("spec.prices.accelerators.H100=3.90", lambda spec: spec.prices.accelerators["H100"], Decimal("3.90")),
    ],
)
def test_a_value_is_set(setting: str, read: Any, value: Any) -> None:
    assert read(parse_job(GOOD, settings=[setting]).spec) == value


def test_a_later_setting_stands_over_an_earlier_one_and_sections_are_made() -> None:
    settings = ["spec.planning.migration.policy=none", "spec.steps=5", "spec.steps=6", "metadata.name=other"]
    job = parse_job(GOOD, settings=settings)
    assert (job.spec.steps, job.metadata.name, job.spec.planning.migration.policy) == (6, "other", "none")
    assert job.spec.planning.cost_weight == 0.25


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("spec.step=5", "--set: spec.step: unknown field; did you mean steps?"),
        ("spec.batch.num_generations=5", "--set: spec.batch.num_generations: unknown field; it is spec.batch.samples"),
        ("spec.learning_rate=1e-6", "--set: spec.learning_rate: unknown field; it belongs to spec.algorithm.critic or"),
        ("spec.steps=0", "--set: spec.steps: 0 is out of bounds; write at least 1"),
        ("spec.steps=five", '--set: spec.steps: "five" is text, not a whole number; write a whole number'),
        ("spec.rewards.2.weight=1", "spec.rewards is a list without '2'; write a position from 0 to 1, or the whole"),
        ("spec.rewards.right.weight=1", "spec.rewards is a list without 'right'"),
        ("spec.steps.x=1", "spec.steps is 10 and has no fields; set spec.steps itself"),
        ("spec.steps", "--set: spec.steps: has no value; write path=value"),
        ("spec..steps=1", "has an empty name between its dots"),
        ("spec.checkpoints.best=yes", "some YAML readers take yes as a truth value"),
        ("spec.budget.money=1e-3", "--set: spec.budget.money: '1e-3' is not a price"),
        ("spec.sampling.stop=[a", "'[a' is not YAML; put it in quotes"),
    ],
)
def test_what_cannot_be_set_is_said_as_of_a_document(setting: str, message: str) -> None:
    assert message in said(setting)
    assert said(setting).startswith("--set: ")


def test_faults_of_the_document_and_of_settings_come_together() -> None:
    text = GOOD.replace("samplesPerPrompt: 4", "samplesPerPrompt: 0")
    with pytest.raises(InvalidJobError) as caught:
        parse_job(text, "job.yaml", settings=["spec.steps=0", "x"])
    assert len(caught.value.faults) == 3


def test_what_is_set_hides_what_the_document_says_there(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD.replace("best: true", "best: yes").replace("steps: 10", "steps: ten"))
    settings = ["spec.checkpoints.best=true", "spec.steps=3"]
    assert load_job(tmp_path / "job.yaml", files=False, settings=settings).spec.steps == 3
