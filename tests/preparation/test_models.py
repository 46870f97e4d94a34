"""What the preparation stage asks of models: the policy, the reference and the critic."""

import gc
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from rlhfless_functions.algorithms.advantages import estimate_advantages
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.model.shared_prompts import SharedPrompts
from rlhfless_functions.preparation import models
from rlhfless_functions.preparation.stage import Preparer
from rlhfless_functions.settings import (
    AlgorithmSettings,
    KlSettings,
    LoraSettings,
    ModelReward,
    PythonReward,
    RewardSettings,
)
from rlhfless_functions.weights import attach_adapter, load_critic, publish_adapter, publish_critic, publish_weights
from tests.preparation.batches import KL, RIGHT, TEMPERATURE, BatchFolder
from tests.preparation.batches import place as place  # The fixtures.
from tests.preparation.batches import preparer as preparer
from tests.preparation.batches import two_groups as two_groups
from tests.weights.random_models import token_values


def perturbed(source: Path, folder: Path, seed: int) -> WeightsReference:
    """Published weights other than the source's."""
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    publish_weights(str(folder), model, AutoTokenizer.from_pretrained(source))
    return WeightsReference(version=seed, uri=str(folder))


def log_probs_alone(folder: str | Path | torch.nn.Module, sample: GeneratedSample) -> list[float]:
    """The plain way: one row, no padding, float64 log-softmax."""
    model = folder if isinstance(folder, torch.nn.Module) else AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([sample.prompt_tokens + sample.response_tokens])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double() / TEMPERATURE
    scores = logits.log_softmax(-1)
    first = len(sample.prompt_tokens) - 1
    return [float(scores[first + position, token]) for position, token in enumerate(sample.response_tokens)]


def test_log_probs_are_those_of_each_row_alone_at_the_sampling_temperature(
    two_groups: BatchFolder, tiny_model: Path, tmp_path: Path
) -> None:
    policy = perturbed(tiny_model, tmp_path / "policy", seed=1)
    result, samples = two_groups.prepare(
        policy=policy,
        old_log_probs=True,
        reference=two_groups.initial,
        algorithm=AlgorithmSettings(kl=KL).resolved(),
        microbatch_tokens=64,
    )
    distance = 0.0
    for sample in samples:
        old, reference = log_probs_alone(policy.uri, sample), log_probs_alone(tiny_model, sample)
        assert sample.old_log_probs == pytest.approx(old, abs=1e-5)
        assert sample.reference_log_probs == pytest.approx(reference, abs=1e-5)
        distance += sum(math.exp(r - p) - 1 - (r - p) for p, r in zip(old, reference, strict=True))
    assert result.metrics["kl/reference/sum"] == pytest.approx(distance, rel=1e-3)
    assert result.metrics["kl/reference/count"] == result.metrics["lengths/sum"]


def test_a_groups_prompt_is_computed_once_and_the_numbers_do_not_depend_on_the_chunk(
    place: BatchFolder, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.materialize([{"prompt": "1+2*3-4;" * 7, "answer": "2"}, {"prompt": "7" * 60, "answer": "4"}])
    place.generate({0: ["2", "3", "2 2 2", "7", "88"], 1: ["5", "4", "44444", "6", ""]})
    made: list[int] = []
    init = SharedPrompts.__init__

    def counted(self: SharedPrompts, body: Any, prompts: list[list[int]], **given: Any) -> None:
        made.append(len(prompts))
        init(self, body, prompts, **given)

    monkeypatch.setattr(SharedPrompts, "__init__", counted)
    settings = {"old_log_probs": True, "reference": place.initial, "algorithm": AlgorithmSettings(kl=KL).resolved()}
    _, shared = place.prepare(**settings)
    assert made == [1, 1, 1, 1], "of each group, for the policy and for the reference"
    for sample in shared:
        expected = log_probs_alone(tiny_model, sample)
        assert sample.old_log_probs == pytest.approx(expected, abs=1e-5)
        assert sample.reference_log_probs == pytest.approx(expected, abs=1e-5)
    for number, tasks in enumerate([place.tasks[:5], place.tasks[5:]]):
        sink = str(place.folder / f"chunk-{number}.parquet")
        assert place.prepare(**settings, samples=tasks, sink=sink)[1] == shared[5 * number :][:5]
    made.clear()
    place.prepare(**settings, share_prompts=False)
    assert made == []


def test_without_a_penalty_no_reference_is_asked(two_groups: BatchFolder, tmp_path: Path) -> None:
    nowhere = WeightsReference(version=0, uri=str(tmp_path / "nowhere"))
    _, samples = two_groups.prepare(reference=nowhere)
    assert all(sample.reference_log_probs is None for sample in samples)


def test_each_version_of_the_policy_is_asked_in_turn(two_groups: BatchFolder, tiny_model: Path, tmp_path: Path) -> None:
    versions = [perturbed(tiny_model, tmp_path / f"policy-{seed}", seed=seed) for seed in (1, 2)]
    for policy in [*versions, versions[0]]:
        _, samples = two_groups.prepare(policy=policy, old_log_probs=True)
        assert samples[0].old_log_probs == pytest.approx(log_probs_alone(policy.uri, samples[0]), abs=1e-5)


def test_weights_that_cannot_be_had_fail_the_task_and_do_not_stay(
    two_groups: BatchFolder, tiny_model: Path, tmp_path: Path
) -> None:
    missing = WeightsReference(version=9, uri=str(tmp_path / "nowhere"))
    assert two_groups.failure(policy=missing, old_log_probs=True).reason == "artifact_missing"
    policy = perturbed(tiny_model, tmp_path / "policy", seed=3)
    _, samples = two_groups.prepare(policy=policy, old_log_probs=True)
    assert samples[0].old_log_probs == pytest.approx(log_probs_alone(policy.uri, samples[0]), abs=1e-5)


def test_with_an_adapter_the_reference_is_the_backbone_with_it_off(
    two_groups: BatchFolder, tiny_model: Path, tmp_path: Path
) -> None:
    lora = LoraSettings(rank=4)
    adapted = attach_adapter(AutoModelForCausalLM.from_pretrained(tiny_model), lora)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    assert isinstance(adapted, PeftModel)
    publish_adapter(str(tmp_path / "adapter"), adapted)
    _, samples = two_groups.prepare(
        model=two_groups.model.model_copy(update={"lora": lora}),
        policy=WeightsReference(version=1, uri=str(tiny_model), adapter=str(tmp_path / "adapter")),
        old_log_probs=True,
        reference=two_groups.initial,
        algorithm=AlgorithmSettings(kl=KL).resolved(),
    )
    for sample in samples:
        assert sample.old_log_probs == pytest.approx(log_probs_alone(adapted, sample), abs=1e-5)
        assert sample.reference_log_probs == pytest.approx(log_probs_alone(tiny_model, sample), abs=1e-5)
    assert samples[0].old_log_probs != pytest.approx(samples[0].reference_log_probs, abs=1e-2)


def test_advantages_are_left_to_the_learner_where_it_asks_its_own_critic(two_groups: BatchFolder) -> None:
    tasks = two_groups.tasks[:1]
    result, samples = two_groups.prepare(algorithm=PPO.resolved(), advantages=False, old_log_probs=True, examples=tasks)
    for sample in samples:
        assert sample.reward is not None
        assert sample.old_log_probs is not None
        assert (sample.values, sample.advantages, sample.returns) == (None, None, None)
    assert "values/sum" not in result.metrics
    assert [example.advantage for example in result.examples] == [None]


PPO = AlgorithmSettings(
    name="ppo", gae_lambda=0.9, gamma=0.99, kl=KlSettings(coefficient=0.2, placement="reward", estimator="k1")
)


def test_with_a_critic_advantages_and_returns_are_estimated_from_its_values(
    two_groups: BatchFolder, tiny_model: Path, tmp_path: Path
) -> None:
    critic = load_critic(two_groups.model, two_groups.initial)
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.score.weight)
    publish_critic(str(tmp_path / "critic"), critic)
    result, samples = two_groups.prepare(
        algorithm=PPO.resolved(),
        critic=WeightsReference(version=1, uri=str(tmp_path / "critic")),
        reference=perturbed(tiny_model, tmp_path / "reference", seed=5),
        old_log_probs=True,
    )
    for sample in samples:
        first = len(sample.prompt_tokens) - 1
        ids = torch.tensor([sample.prompt_tokens + sample.response_tokens])
        with torch.no_grad():
            values = token_values(critic, ids)[0, first:-1].tolist()
        assert sample.values == pytest.approx(values, abs=1e-5)
        expected = estimate_advantages(
            PPO,
            [sample.reward],
            torch.ones(1, len(values), dtype=torch.bool),
            log_probs=torch.tensor([sample.old_log_probs]),
            reference_log_probs=torch.tensor([sample.reference_log_probs]),
            values=torch.tensor([sample.values]),
        )
        assert expected.returns is not None
        assert sample.advantages == pytest.approx(expected.advantages[0].tolist(), abs=1e-6)
        assert sample.returns == pytest.approx(expected.returns[0].tolist(), abs=1e-6)
    assert result.metrics["values/count"] == result.metrics["lengths/sum"]


def test_before_the_first_step_values_are_zero(two_groups: BatchFolder) -> None:
    _, samples = two_groups.prepare(algorithm=AlgorithmSettings(name="ppo").resolved())
    for sample in samples:
        assert sample.values == [0.0] * len(sample.response_tokens)
        assert sample.returns == sample.advantages == pytest.approx([sample.reward] * len(sample.response_tokens))


def test_a_penalty_in_the_reward_is_on_the_samplers_log_probs_where_no_others_are_asked(
    two_groups: BatchFolder, tiny_model: Path
) -> None:
    algorithm = AlgorithmSettings(name="reinforce_plus_plus", kl=PPO.kl).resolved()
    _, samples = two_groups.prepare(algorithm=algorithm, reference=two_groups.initial)
    for sample in samples:
        reference = log_probs_alone(tiny_model, sample)
        penalties = [0.2 * (ours - theirs) for ours, theirs in zip(sample.log_probs, reference, strict=True)]
        assert sample.reward is not None
        expected = [sample.reward - sum(penalties[start:]) for start in range(len(penalties))]
        assert sample.advantages == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_after_a_sleep_every_model_answers_as_before_and_none_was_kept(
    two_groups: BatchFolder, tiny_model: Path, tmp_path: Path
) -> None:
    preparer = two_groups.preparer = Preparer()
    critic = load_critic(two_groups.model, two_groups.initial)
    torch.manual_seed(0)
    with torch.no_grad():
        critic.score.weight.normal_()
    publish_critic(str(tmp_path / "critic"), critic)
    del critic
    judge = Qwen3ForSequenceClassification(Qwen3Config.from_pretrained(tiny_model, num_labels=1))
    judge.save_pretrained(tmp_path / "judge")
    two_groups.tokenizer.save_pretrained(tmp_path / "judge")
    del judge
    settings = {
        "policy": perturbed(tiny_model, tmp_path / "policy", seed=1),
        "old_log_probs": True,
        "reference": two_groups.initial,
        "critic": WeightsReference(version=1, uri=str(tmp_path / "critic")),
        "algorithm": PPO,
        "rewards": [RIGHT, RewardSettings(name="judge", model=ModelReward(source=str(tmp_path / "judge")))],
    }

    def models() -> int:
        gc.collect()
        return sum(issubclass(type(each), PreTrainedModel) for each in gc.get_objects())

    others = models()
    _, expected = two_groups.prepare(**settings)
    assert models() > others
    preparer.sleep()
    assert models() == others
    assert two_groups.prepare(**settings)[1] == expected
    preparer._scorer.close()


def test_a_preloaded_preparer_answers_the_same(two_groups: BatchFolder) -> None:
    fresh = Preparer()
    fresh.preload(two_groups.model, two_groups.initial)
    settings = {"reference": two_groups.initial, "algorithm": AlgorithmSettings(kl=KL).resolved()}
    _, expected = two_groups.prepare(**settings)
    two_groups.preparer = fresh
    result, samples = two_groups.prepare(**settings)
    assert samples == expected
    assert result.load_seconds == 0
    fresh._scorer.close()


def test_seconds_of_loading_count_where_the_result_waited_for_them(
    two_groups: BatchFolder, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer, load = Preparer(), models.load_policy

    def load_slowly(*given: Any) -> Any:
        time.sleep(1.5)
        return load(*given)

    monkeypatch.setattr(models, "load_policy", load_slowly)
    two_groups.preparer = preparer
    settings = {"policy": perturbed(tiny_model, tmp_path / "policy", seed=1), "old_log_probs": True}
    two_groups.prepare()
    assert two_groups.prepare(**settings)[0].load_seconds > 1.0
    assert two_groups.prepare(**settings)[0].load_seconds == 0
    preparer.sleep()
    (tmp_path / "slow.py").write_text("import time\ndef reward(completions): time.sleep(3); return [0.0] * 3\n")
    slow = RewardSettings(name="slow", python=PythonReward(file=str(tmp_path / "slow.py")))
    waited = two_groups.prepare(**settings, rewards=[slow])[0]
    assert waited.load_seconds == 0, "rewards took longer"
    preparer._scorer.close()
