"""What jobs write into `metrics.jsonl`: every number has its unit and meaning in the catalogue and the reference."""

from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api.metrics import LEARNING_METRICS, PREPARATION_METRICS
from rlhfless_operator.job.generated.reference import reference_markdown
from rlhfless_operator.records.metric_catalogue import DRIVER_METRICS, EVALUATION_METRICS, STEP_METRICS, metric_named
from tests.training.whole_jobs import MakeJob, records_of, run_job

LOGGING_REWARD = """
def reward(completions, log_metric, **columns):
    log_metric("sevens", sum(completion.count("7") for completion in completions))
    return [sum(character.isdigit() for character in completion) / 24 for completion in completions]
"""
JOBS: dict[str, dict[str, Any]] = {
    "grpo": {
        "evaluation": {
            "data": {"source": "train.jsonl"},
            "rewards": [{"name": "ends", "format": {"pattern": ".*7"}}],
            "sampling": {"temperature": 0},
        }
    },
    "ppo": {"algorithm": {"name": "ppo", "kl": {"coefficient": 0.0}}},
    "dapo-lora": {"algorithm": {"name": "dapo", "kl": {"coefficient": 0.0}}, "model": {"lora": {"rank": 4}}},
    "ahead": {"async": {"newWeights": "switch", "kvCache": "keep"}},
    "overlap": {
        "batch": {"minibatchSamples": 16},
        "planning": {"policy": "cost"},
    },
}


def run_and_read(make: MakeJob, name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    file: Path = make(name, steps=2, **JOBS[name])
    (file.parent / "reward.py").write_text(LOGGING_REWARD)
    if name == "overlap":
        # A learner follows on a GPU of its own.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    run_job(file)
    return records_of(file)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("name", JOBS)
def test_every_metric_that_a_job_writes_is_in_the_catalogue(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for record in run_and_read(tiny_job, name, monkeypatch):
        unknown = [
            metric
            for metric in record["metrics"]
            if metric_named(metric, STEP_METRICS, rewards=["digits"], logged=["sevens"]) is None
        ]
        assert unknown == [], "add it to api/metrics.py or records/metric_catalogue.py"
        evaluation = record["evaluation"] or {}
        assert [each for each in evaluation if metric_named(each, EVALUATION_METRICS, rewards=["ends"]) is None] == []
        if record["step"]:
            most = {each for each in PREPARATION_METRICS.keys() - {"values"} if "<" not in each}
            of_environments = {each for each in most if each.startswith("environment/")}
            assert most - of_environments <= record["metrics"].keys()
            assert not of_environments & record["metrics"].keys(), "this job has none"
            assert {"reward/digits", "reward/digits/errors", "reward/digits/sevens"} <= record["metrics"].keys()


def test_a_metric_that_no_reward_has_is_in_no_catalogue() -> None:
    assert metric_named("reward/digits", STEP_METRICS, ["digits"]) is STEP_METRICS["reward/<reward>"]
    assert metric_named("reward/digits/errors", STEP_METRICS, ["digits"]) is STEP_METRICS["reward/<reward>/errors"]
    assert metric_named("reward/digits/x", STEP_METRICS, ["digits"], ["x"]) is STEP_METRICS["reward/<reward>/<logged>"]
    for name in ("reward/other", "reward/digits/new", "new", "policy/new"):
        assert metric_named(name, STEP_METRICS, ["digits"]) is None


def test_every_metric_is_in_the_reference_with_its_unit() -> None:
    page = reference_markdown()
    for name, metric in (STEP_METRICS | EVALUATION_METRICS).items():
        assert f"| `{name}` | {metric.unit} | " in page
    assert all(metric.meaning.endswith(".") for metric in STEP_METRICS.values())
    assert not DRIVER_METRICS.keys() & (PREPARATION_METRICS.keys() | LEARNING_METRICS.keys())
