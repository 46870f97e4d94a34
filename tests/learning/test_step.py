"""One training step: gradients, epochs and minibatches, the critic's warm-up."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfless_functions.data.rollouts import PreparedSample
from rlhfless_functions.learning import state as training_state
from rlhfless_functions.learning.state import initial_state
from rlhfless_functions.learning.step import StepInPieces
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    CriticSettings,
    ImportanceSamplingSettings,
    KlSettings,
    LearningSettings,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    SamplingSettings,
)
from tests.learning.steps import assert_same_gradients, learn_request, ragged_samples, take_step
from tests.weights.random_models import token_values

torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["grpo", "ppo", "dr_grpo", "gspo", "rloo"])
def test_micro_batches_of_one_two_and_eight_samples_give_equal_gradients(tiny_model: Path, name: Any) -> None:
    algorithm = AlgorithmSettings(name=name, kl=KlSettings(coefficient=0.1), entropy_coefficient=0.01)
    runs = [
        take_step(
            learn_request(
                tiny_model,
                algorithm=algorithm,
                batch_settings=BatchSettings(prompts_per_step=4, samples_per_prompt=2, microbatch_tokens=tokens),
            ),
            ragged_samples(),
        )
        for tokens in (1, 34, 10_000)
    ]
    for _, _, policy, critic in runs[1:]:
        assert_same_gradients(policy[0], runs[0][2][0])
        if name == "ppo":
            assert_same_gradients(critic[0], runs[0][3][0])


def test_the_gradient_is_the_one_that_the_formula_says(tiny_model: Path) -> None:
    samples = ragged_samples(old_log_probs=None)
    request = learn_request(
        tiny_model,
        algorithm=AlgorithmSettings(
            kl=KlSettings(coefficient=0.3, estimator="k2"), importance_sampling=ImportanceSamplingSettings(high=1.1)
        ),
        sampling=SamplingSettings(max_response_tokens=16, temperature=0.7),
    )
    _, _, (gradients,), _ = take_step(request, samples)

    # −Σ min(π/μ, cap) A ∇log π + β (log π − log π_ref) ∇log π, over all tokens, at the sampling temperature
    model = initial_state(request).policy
    total = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.prompt_tokens + sample.response_tokens])
        logits = model(input_ids=ids).logits[0, len(sample.prompt_tokens) - 1 : -1] / 0.7
        log_probs = torch.log_softmax(logits, -1)[
            range(len(ids[0]) - len(sample.prompt_tokens)), sample.response_tokens
        ]
        weight = (log_probs - torch.tensor(sample.log_probs)).exp().clamp(max=1.1).detach()
        distance = log_probs - torch.tensor(sample.reference_log_probs)
        total = total + (-weight * torch.tensor(sample.advantages) * log_probs + 0.3 * distance.square() / 2).sum()
    (total / sum(len(sample.response_tokens) for sample in samples)).backward()
    assert_same_gradients(gradients, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def test_every_epoch_updates_once_a_minibatch(tiny_model: Path) -> None:
    request = learn_request(
        tiny_model,
        algorithm=AlgorithmSettings(epochs=3),
        batch_settings=BatchSettings(prompts_per_step=4, samples_per_prompt=2, minibatch_samples=2),
    )
    samples = ragged_samples()
    state, report, gradients, _ = take_step(request, samples)
    assert len(gradients) == len(report.policy.losses) == 12
    assert report.tokens == 3 * sum(len(sample.prompt_tokens + sample.response_tokens) for sample in samples)
    assert state.version == 1


@pytest.mark.parametrize("learning", [{"gradient_checkpointing": True}, {"logits_chunk_tokens": 5}])
def test_saving_memory_changes_nothing(tiny_model: Path, learning: dict[str, Any]) -> None:
    algorithm = AlgorithmSettings(name="ppo", entropy_coefficient=0.01)
    _, _, plain, plain_critic = take_step(learn_request(tiny_model, algorithm=algorithm), ragged_samples())
    thrifty = learn_request(tiny_model, algorithm=algorithm, learning=LearningSettings(**learning))
    state, _, saved, saved_critic = take_step(thrifty, ragged_samples())
    assert_same_gradients(saved[0], plain[0])
    assert_same_gradients(saved_critic[0], plain_critic[0])
    assert "gradient_checkpointing" not in learning or state.policy.is_gradient_checkpointing


def with_long_prompts(count: int = 8) -> list[PreparedSample]:
    samples = ragged_samples(count)
    for sample in samples:
        sample.prompt_tokens = [2 + (sample.prompt + place * place) % 50 for place in range(80 + 5 * sample.prompt)]
    return samples


@pytest.mark.parametrize("budget", [16384, 400])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_prompt_that_a_group_shares_gives_the_same_update(
    tiny_model: Path, name: Any, checkpointing: bool, budget: int
) -> None:
    found = {}
    for share in (True, False):
        request = learn_request(
            tiny_model,
            algorithm=AlgorithmSettings(name=name, kl=KlSettings(coefficient=0.1), entropy_coefficient=0.01),
            batch_settings=BatchSettings(prompts_per_step=4, samples_per_prompt=2, microbatch_tokens=budget),
            learning=LearningSettings(share_prompts=share, gradient_checkpointing=checkpointing),
        )
        _, report, (policy,), critic = take_step(request, with_long_prompts())
        found[share] = policy, critic, report
    assert_same_gradients(found[True][0], found[False][0])
    if name == "ppo":
        assert_same_gradients(found[True][1][0], found[False][1][0])
    shared, whole = found[True][2], found[False][2]
    for quantity, value in shared.summary().items():
        assert value == pytest.approx(whole.summary()[quantity], rel=1e-4, abs=1e-5), quantity
    assert whole.shared_tokens == 0
    assert shared.shared_tokens == sum(80 + 5 * prompt for prompt in range(4))
    assert shared.tokens + shared.shared_tokens == whole.tokens


def test_minibatches_are_the_same_whether_prompts_are_shared_or_not(tiny_model: Path) -> None:
    found = []
    for share in (True, False):
        request = learn_request(
            tiny_model,
            batch_settings=BatchSettings(prompts_per_step=2, samples_per_prompt=4, minibatch_samples=4),
            learning=LearningSettings(share_prompts=share),
        )
        samples = with_long_prompts()
        for sample in samples:
            sample.prompt_tokens = samples[4 * (sample.prompt // 2)].prompt_tokens
        _, report, gradients, _ = take_step(request, samples)
        found.append((gradients, report))
    for shared, whole in zip(found[0][0], found[1][0], strict=True):
        # The second update starts from weights that differ by rounding, which Adam's first step makes larger.
        assert_same_gradients(shared, whole, tolerance=1e-3)
    assert found[0][1].shared_tokens > 0


def test_samples_out_of_the_loss_have_no_influence(tiny_model: Path) -> None:
    samples = ragged_samples(9)
    samples[8].mask, samples[8].reward, samples[8].advantages = False, None, None
    _, _, (gradients,), _ = take_step(learn_request(tiny_model), samples)
    _, _, (without,), _ = take_step(learn_request(tiny_model), samples[:8])
    assert_same_gradients(gradients, without, tolerance=0)


def test_a_batch_without_a_sample_in_the_loss_changes_nothing(tiny_model: Path) -> None:
    request = learn_request(tiny_model)
    state, report, gradients, _ = take_step(request, ragged_samples(mask=False, reward=None, advantages=None))
    before = initial_state(request).policy.state_dict()
    assert gradients == []
    assert report.tokens == 0
    assert all(torch.equal(value, before[name]) for name, value in state.policy.state_dict().items())


def test_in_its_warm_up_only_the_critic_learns(tiny_model: Path) -> None:
    request = learn_request(tiny_model, algorithm=AlgorithmSettings(name="ppo", critic=CriticSettings(warmup_steps=2)))
    before = initial_state(request)
    assert before.critic is not None
    for step in (1, 2, 3):
        state, report, policy, critic = take_step(request, ragged_samples(), step)
        assert state.critic is not None
        assert len(critic) == 1
        assert not torch.equal(state.critic.score.weight, before.critic.score.weight)
        frozen = all(
            torch.equal(value, before.policy.state_dict()[name]) for name, value in state.policy.state_dict().items()
        )
        assert frozen == (step <= 2)
        assert len(policy) == (0 if step <= 2 else 1)
        assert (report.learning_rate == 0) == (step <= 2)
        if step > 2:
            continue
        gaps = [
            abs(old - sampler)
            for sample in ragged_samples()
            for old, sampler in zip(sample.old_log_probs or [], sample.log_probs, strict=True)
        ]
        assert report.summary()["sampler_mismatch"] == pytest.approx(sum(map(math.exp, gaps)) / len(gaps), rel=1e-5)


def test_the_critic_s_gradient_is_that_of_the_clipped_regression(tiny_model: Path) -> None:
    samples = ragged_samples()
    request = learn_request(tiny_model, algorithm=AlgorithmSettings(name="ppo", critic=CriticSettings(value_clip=0.1)))
    _, _, _, (gradients,) = take_step(request, samples)
    critic = initial_state(request).critic
    assert critic is not None
    total = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.prompt_tokens + sample.response_tokens])
        values = token_values(critic, ids)[0, len(sample.prompt_tokens) - 1 : -1]
        old, returns = torch.tensor(sample.values), torch.tensor(sample.returns)
        kept = torch.minimum(torch.maximum(values, old - 0.1), old + 0.1)
        total = total + torch.maximum((values - returns) ** 2, (kept - returns) ** 2).sum() / 2
    (total / sum(len(sample.response_tokens) for sample in samples)).backward()
    assert_same_gradients(gradients, {name: p.grad for name, p in critic.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(("field", "who"), [("advantages", "policy"), ("returns", "critic")])
def test_a_loss_that_is_not_finite_names_the_step(tiny_model: Path, field: str, who: str) -> None:
    samples = ragged_samples()
    setattr(samples[3], field, [math.nan] * len(samples[3].response_tokens))
    request = learn_request(
        tiny_model, algorithm=AlgorithmSettings(name="ppo", advantage_normalization="none", clip="cispo")
    )
    with pytest.raises(TaskError, match=f"step 7: the {who}'s update failed: the loss is nan") as caught:
        take_step(request, samples, step=7)
    assert caught.value.reason == "non_finite_loss"


def test_it_asks_before_every_micro_batch_whether_to_go_on(tiny_model: Path) -> None:
    asked = []
    request = learn_request(
        tiny_model,
        batch_settings=BatchSettings(prompts_per_step=4, samples_per_prompt=2, microbatch_tokens=1),
    )
    take_step(request, ragged_samples(), check=lambda: asked.append(1))
    assert len(asked) == 8


def test_only_the_adapter_learns(tiny_model: Path) -> None:
    lora = LoraSettings(rank=2, alpha=4.0)
    request = learn_request(tiny_model, model=ModelSettings(source=str(tiny_model), dtype="bfloat16", lora=lora))
    state, _, (gradients,), _ = take_step(request, ragged_samples())
    assert all("lora_" in name for name in gradients)
    before = initial_state(request).policy.state_dict()
    changed = {name for name, value in state.policy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_B" in name for name in changed), "B starts at zero, so A has no gradient yet"
    dtypes = {parameter.dtype for name, parameter in state.policy.named_parameters() if "lora_" in name}
    assert dtypes == {torch.float32}


def test_a_replay_draws_the_same_dropout(tiny_model: Path) -> None:
    lora = LoraSettings(rank=2, dropout=0.5)
    request = learn_request(tiny_model, model=ModelSettings(source=str(tiny_model), dtype="float32", lora=lora))
    _, _, (one,), _ = take_step(request, ragged_samples())
    torch.rand(3)
    _, _, (same,), _ = take_step(request, ragged_samples())
    _, _, (other_step,), _ = take_step(request, ragged_samples(), step=2)
    assert_same_gradients(one, same, tolerance=0)
    assert any(not torch.equal(gradient, other_step[name]) for name, gradient in one.items())


def test_the_policys_warm_up_begins_when_the_critics_is_over(tiny_model: Path) -> None:
    request = learn_request(
        tiny_model,
        algorithm=AlgorithmSettings(name="ppo", critic=CriticSettings(warmup_steps=3)),
        optimizer=OptimizerSettings(learning_rate=1.0, warmup_steps=3, schedule="linear"),
        total_steps=8,
    )
    state = initial_state(request)
    steps = [StepInPieces(state, request, step) for step in range(1, 9)]
    assert [step.end().learning_rate for step in steps] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 0.5]


def test_bfloat16_arithmetic_keeps_float32_weights(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_state, "NARROWEST_ON_CPU", 1)
    request = learn_request(
        tiny_model,
        model=ModelSettings(source=str(tiny_model), dtype="bfloat16"),
        algorithm=AlgorithmSettings(name="ppo"),
    )
    outcomes = {}
    for available in (True, False):
        monkeypatch.setattr(training_state, "has_bfloat16", lambda _, available=available: available)
        state, _, (gradients,), (of_critic,) = take_step(request, ragged_samples())
        assert {value.dtype for value in state.policy.parameters()} == {torch.float32}
        assert {value.dtype for value in gradients.values()} == {torch.float32}
        outcomes[available] = gradients, of_critic
    for narrow, wide in zip(outcomes[True], outcomes[False], strict=True):
        assert_same_gradients(narrow, wide, tolerance=0.1)
        assert any(not torch.equal(gradient, wide[name]) for name, gradient in narrow.items())


def test_bfloat16_arithmetic_is_for_master_weights_of_bfloat16_models_that_are_wide_enough(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_state, "has_bfloat16", lambda _: True)
    narrow = ModelSettings(source=str(tiny_model), dtype="bfloat16")
    adapted = narrow.model_copy(update={"lora": LoraSettings(rank=2)})
    cases = [
        (learn_request(tiny_model, model=narrow), 1, True),
        (learn_request(tiny_model, model=narrow), 33, False),
        (learn_request(tiny_model), 1, False),
        (learn_request(tiny_model, learning=LearningSettings(autocast=True)), 1, True),
        (learn_request(tiny_model, model=narrow, learning=LearningSettings(autocast=False)), 1, False),
        (learn_request(tiny_model, model=adapted), 1, False),
    ]
    for request, narrowest, expected in cases:
        monkeypatch.setattr(training_state, "NARROWEST_ON_CPU", narrowest)
        context = training_state.autocast(request, initial_state(request).policy)
        assert isinstance(context, torch.autocast if expected else nullcontext)
