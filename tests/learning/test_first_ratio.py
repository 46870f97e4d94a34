"""Ratios of a step's updates: 1 until something is learnt, and then to the policy that the step began with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions.learning import state as training_state
from rlhfless_functions.learning.batch import TrainingBatch
from rlhfless_functions.learning.state import initial_state
from rlhfless_functions.learning.step import train_step
from rlhfless_functions.model.forward import collate, response_log_probs
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    KlSettings,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
)
from tests.learning.steps import assert_same_gradients, learn_request, ragged_samples, take_step
from tests.training.whole_jobs import MakeJob, records_of, run_job

torch.set_num_threads(1)

pytestmark = pytest.mark.usefixtures("warm_start")

FOUR_UPDATES = BatchSettings(prompts_per_step=4, samples_per_prompt=2, minibatch_samples=2)

COMPUTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padded": ({}, {"pack": "never"}),
    "packed": ({}, {"pack": "always"}),
    "prompts with each sample": ({}, {"share_prompts": False}),
    "checkpointed, small chunks": ({}, {"gradient_checkpointing": True, "logits_chunk_tokens": 3}),
    "an adapter": ({"lora": LoraSettings(rank=2)}, {}),
}


@pytest.mark.parametrize("computing", COMPUTING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo", "ppo", "cispo"])
def test_it_is_one_before_anything_is_learnt(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: Any, dtype: Any, computing: str
) -> None:
    """The learning rate is so small that the policy of each update is the first's."""
    monkeypatch.setattr(training_state, "NARROWEST_ON_CPU", 1)
    model, learning = COMPUTING[computing]
    request = learn_request(
        tiny_model,
        model=ModelSettings(source=str(tiny_model), dtype=dtype, **model),
        learning=LearningSettings(**learning),
        algorithm=AlgorithmSettings(name=name, kl=KlSettings(coefficient=0.1)),
        optimizer=OptimizerSettings(learning_rate=1e-12),
        batch_settings=FOUR_UPDATES,
    )
    _, report, gradients, _ = take_step(request, ragged_samples())
    summary = report.summary()
    assert len(gradients) == 4
    assert summary["ratio_min"] == pytest.approx(1, abs=1e-6)
    assert summary["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert summary["clip_low"] == summary["clip_high"] == 0


@pytest.mark.parametrize("computing", ["padded", "packed", "prompts with each sample", "checkpointed, small chunks"])
def test_it_is_one_with_an_adapter_that_drops(tiny_model: Path, computing: str) -> None:
    """Old log-probabilities drop what the loss drops, in every epoch."""
    model = ModelSettings(source=str(tiny_model), dtype="float32", lora=LoraSettings(rank=2, dropout=0.3))
    request = learn_request(
        tiny_model,
        model=model,
        learning=LearningSettings(**COMPUTING[computing][1]),
        algorithm=AlgorithmSettings(epochs=2),
        optimizer=OptimizerSettings(learning_rate=1e-12),
        batch_settings=FOUR_UPDATES,
    )
    state = initial_state(request)
    for name, parameter in state.policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    batch = TrainingBatch(ragged_samples(), request.algorithm, 1)
    report = train_step(state, batch, request, 1, lambda: None)
    summary = report.summary()
    assert len(report.policy.losses) == 8
    assert summary["ratio_min"] == pytest.approx(1, abs=1e-6)
    assert summary["ratio_max"] == pytest.approx(1, abs=1e-6)


def test_later_updates_compare_with_the_policy_that_the_step_began_with(tiny_model: Path) -> None:
    """What preparation has said of the policy is not looked at: it knows the rounded weights alone."""
    request = learn_request(tiny_model, algorithm=AlgorithmSettings(epochs=2), batch_settings=FOUR_UPDATES)
    _, report, gradients, _ = take_step(request, ragged_samples())
    _, without, others, _ = take_step(request, ragged_samples(old_log_probs=None))
    assert len(gradients) == 8
    for some, same in zip(gradients, others, strict=True):
        assert_same_gradients(some, same, tolerance=0)
    assert report.summary() == without.summary()
    assert report.summary()["ratio_min"] < 0.999 < 1.001 < report.summary()["ratio_max"]


def test_the_second_update_is_that_of_the_formula(tiny_model: Path) -> None:
    request = learn_request(
        tiny_model,
        algorithm=AlgorithmSettings(clip_low=1.0, clip_high=1000.0),
        optimizer=OptimizerSettings(learning_rate=1e-2, epsilon=1e-3, max_gradient_norm=1e6),
        batch_settings=BatchSettings(prompts_per_step=4, samples_per_prompt=2, minibatch_samples=4),
    )
    samples = ragged_samples()
    for sample in samples:
        sample.log_probs = [-100.0] * len(sample.log_probs)  # every importance weight is at its cap, 2
    _, _, (_, gradients), _ = take_step(request, samples)

    first, second = TrainingBatch(samples, request.algorithm, 1).minibatches(4, request.seed, 1, 0)
    before = initial_state(request).policy
    after = take_step(request, [samples[row] for row in sorted(first)])[0].policy
    after.zero_grad()
    total = torch.zeros(())
    for sample in (samples[row] for row in second):
        batch = collate([sample.prompt_tokens], [sample.response_tokens], 0)
        old, new = (response_log_probs(model, batch, 1.0)[0][0] for model in (before, after))
        total = total - 2 * ((new - old.detach()).exp() * torch.tensor(sample.advantages)).sum()
    (total / sum(len(samples[row].response_tokens) for row in second)).backward()
    expected = {name: p.grad for name, p in after.named_parameters() if p.grad is not None}
    assert_same_gradients(gradients, expected, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), [("grpo", None), ("gspo", None), ("rloo", {"rank": 2})])
def test_a_whole_job_in_bfloat16_begins_each_step_with_a_ratio_of_one(
    tiny_job: MakeJob, name: str, lora: dict[str, Any] | None
) -> None:
    file = tiny_job(
        model={"dtype": "bfloat16", "lora": lora},
        algorithm={"name": name},
        batch={"minibatchSamples": 4},
        optimizer={"learningRate": 1e-12},
        steps=2,
    )
    assert run_job(file)["phase"] == "Succeeded"
    for record in records_of(file):
        metrics = record["metrics"]
        assert metrics["policy/updates"] == 4
        assert metrics["policy/ratio_min"] == pytest.approx(1, abs=1e-6)
        assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-6)
        assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 0
