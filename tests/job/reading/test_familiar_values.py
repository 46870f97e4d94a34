"""What to write for fields of TRL and verl whose values mean something else here."""

from typing import Any

import pytest
import yaml

from tests.job.good_document import GOOD, faults, only


def said(section: str | None = "optimizer", spec: dict[str, Any] | None = None, **theirs: Any) -> str:
    document = yaml.safe_load(GOOD)
    document["spec"] |= spec or {}
    (document["spec"][section] if section else document["spec"]).update(theirs)
    return str(only(yaml.safe_dump(document)))


@pytest.mark.parametrize(
    ("theirs", "remedy"),
    [
        ({"warmup_ratio": 0.1}, "write spec.optimizer.warmupSteps: 5 (0.1 × 48 steps)"),
        ({"lr_warmup_steps_ratio": 0.1}, "write spec.optimizer.warmupSteps: 4 (0.1 × 48 steps)"),
        (
            {"per_device_train_batch_size": 16},
            "in TRL a step has per_device_train_batch_size 16 × gradient_accumulation_steps 1 × processes samples, here"
            " promptsPerStep × samplesPerPrompt: write spec.batch.promptsPerStep: 4 × processes with samplesPerPrompt:"
            " 4; memory is bounded by spec.batch.microbatchTokens",
        ),
        ({"trainer": "grpo"}, "write spec.algorithm: {name: grpo}"),
        ({"trainer": "RLOOTrainer"}, "write spec.algorithm: {name: rloo}"),
        (
            {"trainer": {"total_epochs": 3, "n_gpus_per_node": 8}},
            "remove the section: total_epochs is spec.epochs; rlhfless convert turns the whole file into a job",
        ),
        ({"adv_estimator": "grpo"}, "write spec.algorithm: {name: grpo}"),
        ({"algorithm.adv_estimator": "gae"}, "write spec.algorithm: {name: ppo}"),
        (
            {"critic_warmup": 5},
            "write spec.algorithm.critic.warmupSteps: 4 (in verl the policy learns from step 5 on)",
        ),
        ({"logging_steps": 10}, "remove it: every step is in metrics.jsonl and in what spec.tracking names"),
        ({"log_completions": True}, "remove it: responses are in samples.jsonl and in the report of each run"),
        ({"scale_rewards": False}, "write spec.algorithm.advantageNormalization: none"),
        ({"bf16": True}, "write spec.model.dtype: bfloat16"),
        ({"report_to": "wandb"}, "write spec.tracking: {wandb: {project: NAME}}"),
        ({"report_to": ["tensorboard"]}, "write spec.tracking: {tensorboard: true}"),
    ],
)
@pytest.mark.parametrize("section", ["optimizer", "algorithm", None])
def test_a_value_is_converted(section: str | None, theirs: dict[str, Any], remedy: str) -> None:
    place = f"spec.{section}" if section else "spec"
    assert said(section, {"steps": 48}, **theirs) == f"{place}.{next(iter(theirs))}: unknown field; {remedy}"


def test_trls_batch_is_computed_from_all_of_its_fields() -> None:
    document = yaml.safe_load(GOOD)
    document["spec"]["batch"] = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "num_generations": 16,
    }
    messages = [str(fault) for fault in faults(yaml.safe_dump(document))]
    wanted = "promptsPerStep: 2 × processes with samplesPerPrompt: 16"
    assert [message.partition(":")[0] for message in messages if wanted in message] == [
        "spec.batch.gradient_accumulation_steps",
        "spec.batch.per_device_train_batch_size",
    ]


def test_without_steps_the_ratio_stays_a_ratio() -> None:
    text = GOOD.replace("steps: 10", "epochs: 2").replace("schedule: cosine", "warmup_ratio: 0.1")
    assert "write spec.optimizer.warmupSteps: 0.1 × the number of steps; an epoch has" in only(text).remedy


@pytest.mark.parametrize("theirs", [{"warmup_ratio": "a"}, {"adv_estimator": 1}, {"trainer": 5}, {"report_to": None}])
def test_a_value_that_means_nothing_leaves_the_name(theirs: dict[str, Any]) -> None:
    assert "unknown field; it is spec." in said(**theirs)
