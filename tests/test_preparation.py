"""The preparation stage on a tiny model: what it writes for the learner, and how it fails."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhfless_functions import artifacts
from rlhfless_functions.algorithms.advantages import estimate_advantages
from rlhfless_functions.api import (
    Event,
    MaterializeRequest,
    MaterializeResult,
    PrepareRequest,
    PrepareResult,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.preparation import Preparer
from rlhfless_functions.rollouts import (
    PreparedSample,
    Rollout,
    VersionSpan,
    read_prepared,
    read_prompts,
    write_rollouts,
)
from rlhfless_functions.settings import (
    AlgorithmSettings,
    DataSettings,
    ExactMatchReward,
    FormatReward,
    KlSettings,
    LoraSettings,
    ModelSettings,
    PythonReward,
    RewardSettings,
    SamplingSettings,
)
from rlhfless_functions.shared_prompts import SharedPrompts
from rlhfless_functions.task import TaskContext, TaskError
from rlhfless_functions.weights import attach_adapter, load_critic, publish_adapter, publish_critic, publish_weights

EOS = 1
TEMPERATURE = 0.7
SAMPLING = SamplingSettings(temperature=TEMPERATURE, max_prompt_tokens=64, max_response_tokens=16)
RIGHT = RewardSettings(name="right", exact_match=ExactMatchReward())
KL = KlSettings(coefficient=0.1)


def make_context() -> TaskContext:
    def emit(event: Event) -> None:
        pass

    return TaskContext(emit=emit)


@pytest.fixture(scope="module")
def preparer() -> Iterator[Preparer]:
    torch.set_num_threads(1)
    preparer = Preparer()
    yield preparer
    preparer.close()


class Workplace:
    """A folder with a materialised dataset, rollouts and room for what is prepared of them."""

    def __init__(self, folder: Path, model: Path, preparer: Preparer) -> None:
        self.folder = folder
        self.preparer = preparer
        self.model = ModelSettings(source=str(model), dtype="float32")
        self.initial = WeightsReference(version=0, uri=str(model))
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.parts: list[str] = []
        self.tasks: list[SampleTask] = []

    def key(self) -> TaskKey:
        return TaskKey(job_uid="job", step=3, stage="preparation", part="0", attempt=0)

    def materialize(self, rows: list[dict[str, Any]], name: str = "prompts", **settings: Any) -> MaterializeResult:
        source = self.folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        request = MaterializeRequest(
            key=self.key(),
            result="",
            model=settings.pop("model", self.model),
            data=DataSettings(source=str(source)),
            sampling=settings.pop("sampling", SAMPLING),
            sink=str(self.folder / name),
        )
        result = self.preparer.run(request, make_context())
        assert isinstance(result, MaterializeResult)
        return result

    def generate(self, responses: dict[int, list[str]], finish: str = "stop") -> None:
        """Roll out responses, given as text; all but truncated ones end with EOS."""
        rollouts = []
        for prompt, texts in responses.items():
            tokens = read_prompts(str(self.folder / "prompts"), rows=[prompt])[0].tokens
            for index, text in enumerate(texts):
                ids = self.tokenizer(text)["input_ids"] + ([EOS] if finish == "stop" else [])
                rollouts.append(make_rollout(prompt, index, tokens, ids, finish))
        self.add(rollouts)

    def add(self, rollouts: list[Rollout]) -> None:
        self.parts.append(str(self.folder / f"rollouts-{len(self.parts)}.parquet"))
        write_rollouts(self.parts[-1], rollouts)
        self.tasks += [SampleTask(prompt=rollout.prompt, index=rollout.index) for rollout in rollouts]

    def prepare(self, context: TaskContext | None = None, **changes: Any) -> tuple[PrepareResult, list[PreparedSample]]:
        fields: dict[str, Any] = {
            "key": self.key(),
            "result": "",
            "model": self.model,
            "prompts": str(self.folder / "prompts"),
            "rollouts": self.parts,
            "samples": self.tasks,
            "rewards": [RIGHT],
            "algorithm": AlgorithmSettings().resolved(),
            "sampling": SAMPLING,
            "policy": self.initial,
            "old_log_probs": False,
            "microbatch_tokens": 256,
            "sink": str(self.folder / "prepared.parquet"),
        }
        request = PrepareRequest(**{**fields, **changes})
        result = self.preparer.run(request, context or make_context())
        assert isinstance(result, PrepareResult)
        found = read_prepared([result.part])
        return result, [found[task.prompt, task.index] for task in request.samples]

    def failure(self, **changes: Any) -> TaskError:
        with pytest.raises(TaskError) as raised:
            self.prepare(**changes)
        assert not (self.folder / "prepared.parquet").exists()
        return raised.value


def make_rollout(prompt: int, index: int, tokens: list[int], ids: list[int], finish: Any = "stop") -> Rollout:
    log_probs = [-0.5 - 0.01 * position for position in range(len(ids))]
    return Rollout(prompt, index, tokens, ids, log_probs, finish, [VersionSpan(2, 0, len(ids))])


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, preparer: Preparer) -> Workplace:
    return Workplace(tmp_path, tiny_model, preparer)


@pytest.fixture
def two_groups(place: Workplace) -> Workplace:
    place.materialize([{"prompt": "1+1=", "answer": "2"}, {"prompt": "the sum of 2 and 2 is", "answer": "4"}])
    place.generate({0: ["2", "3", "2 2 2"], 1: ["5", "4", "44444"]})
    return place


def perturbed(source: Path, folder: Path, seed: int) -> WeightsReference:
    """Published weights other than the source's."""
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    publish_weights(str(folder), model, AutoTokenizer.from_pretrained(source))
    return WeightsReference(version=seed, uri=str(folder))


def log_probs_alone(folder: str | Path | torch.nn.Module, sample: Rollout) -> list[float]:
    """The plain way: one row, no padding, float64 log-softmax."""
    model = folder if isinstance(folder, torch.nn.Module) else AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([sample.prompt_tokens + sample.response_tokens])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double() / TEMPERATURE
    scores = logits.log_softmax(-1)
    first = len(sample.prompt_tokens) - 1
    return [float(scores[first + position, token]) for position, token in enumerate(sample.response_tokens)]


# --- materialising -----------------------------------------------------------------------------------------------


def test_a_dataset_is_materialised_once_for_all_functions(place: Workplace) -> None:
    result = place.materialize([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1" * 65}, {"prompt": "2"}])
    assert (result.prompts, result.dropped, result.uri) == (2, 1, str(place.folder / "prompts"))
    prompts = read_prompts(result.uri)
    assert [prompt.text for prompt in prompts] == ["1+1=", "2"]
    assert artifacts.read_json(artifacts.join(result.uri, "index.json"))["lengths"] == [4, 1]


def test_chat_data_uses_the_jobs_template(place: Workplace) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    model = place.model.model_copy(update={"chat_template": template})
    place.materialize([{"messages": [{"role": "user", "content": "1+1"}]}], model=model)
    assert read_prompts(str(place.folder / "prompts"))[0].text == "1+1="


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([], {}, "is empty"),
        ([{"messages": [{"role": "user", "content": "1"}]}], {}, "no chat template"),
        ([{"prompt": "1"}], {"sampling": SamplingSettings(max_response_tokens=512)}, "the model's 512 positions"),
    ],
)
def test_bad_data_publishes_nothing(place: Workplace, rows: list[Any], settings: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words) as raised:
        place.materialize(rows, **settings)
    assert raised.value.reason == "data_invalid"
    assert not (place.folder / "prompts").exists()


# --- rewards and advantages --------------------------------------------------------------------------------------


def test_groups_are_scored_and_compared_within_themselves(two_groups: Workplace) -> None:
    result, samples = two_groups.prepare()
    assert [sample.reward for sample in samples] == [1, 0, 0, 0, 1, 0]
    assert [sample.reward_terms for sample in samples[:2]] == [{"right": 1.0}, {"right": 0.0}]
    assert [group.prompt for group in result.groups] == [0, 1]
    assert all(group.reward == pytest.approx(1 / 3) for group in result.groups)
    assert all(group.spread == pytest.approx(math.sqrt(1 / 3)) for group in result.groups)
    high, low = (1 - 1 / 3) / (math.sqrt(1 / 3) + 1e-4), (0 - 1 / 3) / (math.sqrt(1 / 3) + 1e-4)
    for sample, advantage in zip(samples, [high, low, low, low, high, low], strict=True):
        assert sample.advantages == pytest.approx([advantage] * len(sample.response_tokens), rel=1e-6)
        assert sample.mask and sample.returns is None and sample.values is None
        assert sample.old_log_probs is None and sample.reference_log_probs is None
        assert (sample.group_reward_mean, sample.group_reward_std) == pytest.approx((1 / 3, math.sqrt(1 / 3)))


def test_the_same_prompt_text_twice_is_two_groups(place: Workplace) -> None:
    place.materialize([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "3"}])
    place.generate({0: ["2", "2"], 1: ["2", "3"]})
    result, samples = place.prepare()
    assert [sample.reward for sample in samples] == [1, 1, 0, 1]
    assert [group.spread for group in result.groups] == [0.0, pytest.approx(math.sqrt(0.5))]
    assert all(advantage == 0 for sample in samples[:2] for advantage in sample.advantages or [1])


def test_token_ids_come_from_the_engine_never_from_text(place: Workplace) -> None:
    # "12" could be tokenised otherwise, <pad> has no text, and EOS is not decoded: the ids must survive all of it.
    place.materialize([{"prompt": "1+1=", "answer": "2"}])
    two = place.tokenizer("2")["input_ids"]
    ids = [[*two, EOS], [0, *two, 0, EOS], [EOS]]
    prompt = [5, 6, 7]
    place.add([make_rollout(0, index, prompt, row) for index, row in enumerate(ids)])
    _, samples = place.prepare(old_log_probs=True)
    assert [sample.response_tokens for sample in samples] == ids
    assert [sample.prompt_tokens for sample in samples] == [prompt] * 3
    assert [sample.reward for sample in samples] == [1, 1, 0]
    assert all(len(sample.advantages or []) == len(sample.response_tokens) for sample in samples)
    assert samples[0].versions == [VersionSpan(2, 0, 2)]


def test_rewards_see_columns_and_decoded_text(place: Workplace, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(prompts, completions, completion_ids, level, ground_truth, trainer_state):\n"
        "    assert prompts == ['1+1='] * 2 and completions == ['2', '33'] and level == [7, 7]\n"
        "    assert ground_truth == ['2', '2'] and trainer_state.global_step == 3\n"
        "    return [len(ids) for ids in completion_ids]\n"
    )
    place.materialize([{"prompt": "1+1=", "answer": "2", "level": 7}])
    place.generate({0: ["2", "33"]})
    mine = RewardSettings(name="mine", python=PythonReward(file=str(tmp_path / "mine.py")))
    assert [sample.reward for sample in place.prepare(rewards=[mine])[1]] == [2.0, 3.0]


def test_unscorable_samples_are_out_of_the_baseline_and_of_the_loss(place: Workplace, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(completions): return [None if c == 'x' else float(c) for c in completions]"
    )
    place.materialize([{"prompt": "1"}, {"prompt": "2"}])
    place.generate({0: ["1", "x", "0"], 1: ["x", "x", "x"]})
    mine = RewardSettings(name="mine", python=PythonReward(file=str(tmp_path / "mine.py")))
    result, samples = place.prepare(rewards=[mine])
    assert [sample.reward for sample in samples] == [1, None, 0, None, None, None]
    assert [sample.mask for sample in samples] == [True, False, True, False, False, False]
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert [(sample.advantages or [9])[0] for sample in samples] == pytest.approx([expected, 0, -expected, 0, 0, 0])
    assert [(group.reward, group.spread) for group in result.groups] == [
        (0.5, pytest.approx(math.sqrt(0.5))),
        (None, 0),
    ]
    assert result.metrics["reward/unscorable/count"] == result.metrics["masked/count"] == 4
    assert result.metrics["zero_variance_groups/count"] == 0


def test_truncated_samples_are_masked_only_where_asked(place: Workplace) -> None:
    place.materialize([{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}])
    place.generate({0: ["2", "3"]})
    place.generate({1: ["4", "3"]}, finish="truncated")
    result, samples = place.prepare()
    assert all(sample.mask for sample in samples)
    assert (result.metrics["truncated/sum"], result.metrics["masked/count"]) == (2, 0)
    masking = AlgorithmSettings(mask_truncated=True).resolved()
    result, samples = place.prepare(algorithm=masking)
    assert [sample.mask for sample in samples] == [True, True, False, False]
    assert result.metrics["masked/count"] == 2
    assert [sample.reward for sample in samples] == [1, 0, 1, 0]


def test_an_evaluation_is_scored_and_nothing_more(two_groups: Workplace) -> None:
    result, samples = two_groups.prepare(
        purpose="evaluation", old_log_probs=True, reference=two_groups.initial, algorithm=AlgorithmSettings(kl=KL)
    )
    assert [group.reward for group in result.groups] == [pytest.approx(1 / 3)] * 2
    assert {sample.advantages is sample.old_log_probs is sample.reference_log_probs is None for sample in samples} == {
        True
    }


def test_an_evaluation_shows_the_first_samples_of_the_first_prompts(place: Workplace) -> None:
    place.materialize([{"prompt": f"{row}+1=", "answer": str(row + 1)} for row in range(9)])
    place.generate({8: ["9"], 0: ["1", "2"], 7: ["7", "8"]})
    examples = place.prepare(purpose="evaluation")[0].examples
    assert [(example.prompt, example.response, example.reward, example.tokens) for example in examples] == [
        ("0+1=", "1", 1.0, 2),
        ("7+1=", "7", 0.0, 2),
    ]
    assert place.prepare()[0].examples == []


def test_how_a_step_is_cut_into_chunks_changes_nothing(two_groups: Workplace) -> None:
    settings = {
        "old_log_probs": True,
        "reference": two_groups.initial,
        "algorithm": AlgorithmSettings(kl=KL).resolved(),
        "rewards": [RIGHT, RewardSettings(name="digits", format=FormatReward(pattern=r"\d+"), weight=0.5)],
    }
    whole, samples = two_groups.prepare(**settings)
    results, parts = [], []
    for number, tasks in enumerate([two_groups.tasks[:3], two_groups.tasks[3:]]):
        sink = str(two_groups.folder / f"chunk-{number}.parquet")
        result, chunk = two_groups.prepare(**settings, samples=tasks, sink=sink)
        results.append(result)
        parts += chunk
    assert parts == samples  # to the last bit
    for name, value in whole.metrics.items():
        if not name.startswith("seconds/"):
            assert value == pytest.approx(sum(result.metrics[name] for result in results), abs=1e-5), name


def test_metrics_are_sums_and_counts(two_groups: Workplace) -> None:
    result, samples = two_groups.prepare()
    lengths = [len(sample.response_tokens) for sample in samples]
    assert {name: value for name, value in result.metrics.items() if not name.startswith("seconds/")} == {
        "reward/sum": 2,
        "reward/count": 6,
        "reward/square/sum": 2,
        "reward/unscorable/count": 0,
        "reward/right/sum": 2,
        "reward/right/count": 6,
        "reward/right/unscorable/count": 0,
        "reward/right/errors/count": 0,
        "groups/count": 2,
        "zero_variance_groups/count": 0,
        "lengths/sum": sum(lengths),
        "lengths/count": 6,
        "prompt_lengths/sum": 4 + 21,
        "prompt_lengths/count": 2,
        "truncated/sum": 0,
        "truncated/count": 6,
        "masked/count": 0,
    }
    assert all(name.endswith(("/sum", "/count")) for name in result.metrics)


# --- models ------------------------------------------------------------------------------------------------------


def test_log_probs_are_those_of_each_row_alone_at_the_sampling_temperature(
    two_groups: Workplace, tiny_model: Path, tmp_path: Path
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
    place: Workplace, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.materialize([{"prompt": "1+2*3-4;" * 7, "answer": "2"}, {"prompt": "7" * 60, "answer": "4"}])
    place.generate({0: ["2", "3", "2 2 2", "7", "88"], 1: ["5", "4", "44444", "6", ""]})
    made: list[int] = []
    init = SharedPrompts.__init__

    def counted(self: SharedPrompts, body: Any, prompts: list[list[int]]) -> None:
        made.append(len(prompts))
        init(self, body, prompts)

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


def test_without_a_penalty_no_reference_is_asked(two_groups: Workplace, tmp_path: Path) -> None:
    nowhere = WeightsReference(version=0, uri=str(tmp_path / "nowhere"))
    _, samples = two_groups.prepare(reference=nowhere)
    assert all(sample.reference_log_probs is None for sample in samples)


def test_each_version_of_the_policy_is_asked_in_turn(two_groups: Workplace, tiny_model: Path, tmp_path: Path) -> None:
    versions = [perturbed(tiny_model, tmp_path / f"policy-{seed}", seed=seed) for seed in (1, 2)]
    for policy in [*versions, versions[0]]:
        _, samples = two_groups.prepare(policy=policy, old_log_probs=True)
        assert samples[0].old_log_probs == pytest.approx(log_probs_alone(policy.uri, samples[0]), abs=1e-5)


def test_weights_that_cannot_be_had_fail_the_task_and_do_not_stay(
    two_groups: Workplace, tiny_model: Path, tmp_path: Path
) -> None:
    missing = WeightsReference(version=9, uri=str(tmp_path / "nowhere"))
    assert two_groups.failure(policy=missing, old_log_probs=True).reason == "artifact_missing"
    policy = perturbed(tiny_model, tmp_path / "policy", seed=3)
    _, samples = two_groups.prepare(policy=policy, old_log_probs=True)
    assert samples[0].old_log_probs == pytest.approx(log_probs_alone(policy.uri, samples[0]), abs=1e-5)


def test_with_an_adapter_the_reference_is_the_backbone_with_it_off(
    two_groups: Workplace, tiny_model: Path, tmp_path: Path
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


PPO = AlgorithmSettings(
    name="ppo", gae_lambda=0.9, gamma=0.99, kl=KlSettings(coefficient=0.2, placement="reward", estimator="k1")
)


def test_with_a_critic_advantages_and_returns_are_estimated_from_its_values(
    two_groups: Workplace, tiny_model: Path, tmp_path: Path
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
            values = critic(ids)[0, first:-1].tolist()
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


def test_before_the_first_step_values_are_zero(two_groups: Workplace) -> None:
    _, samples = two_groups.prepare(algorithm=AlgorithmSettings(name="ppo").resolved())
    for sample in samples:
        assert sample.values == [0.0] * len(sample.response_tokens)
        assert sample.returns == sample.advantages == pytest.approx([sample.reward] * len(sample.response_tokens))


def test_a_penalty_in_the_reward_is_on_the_samplers_log_probs_where_no_others_are_asked(
    two_groups: Workplace, tiny_model: Path
) -> None:
    algorithm = AlgorithmSettings(name="reinforce_plus_plus", kl=PPO.kl).resolved()
    _, samples = two_groups.prepare(algorithm=algorithm, reference=two_groups.initial)
    for sample in samples:
        reference = log_probs_alone(tiny_model, sample)
        penalties = [0.2 * (ours - theirs) for ours, theirs in zip(sample.log_probs, reference, strict=True)]
        assert sample.reward is not None
        expected = [sample.reward - sum(penalties[start:]) for start in range(len(penalties))]
        assert sample.advantages == pytest.approx(expected, abs=1e-5)


def test_a_preloaded_preparer_answers_the_same(two_groups: Workplace) -> None:
    fresh = Preparer()
    fresh.preload(two_groups.model, two_groups.initial)
    settings = {"reference": two_groups.initial, "algorithm": AlgorithmSettings(kl=KL).resolved()}
    _, expected = two_groups.prepare(**settings)
    two_groups.preparer = fresh
    assert two_groups.prepare(**settings)[1] == expected
    fresh.close()


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_missing_or_unfinished_sample_is_named(two_groups: Workplace) -> None:
    error = two_groups.failure(samples=[*two_groups.tasks, SampleTask(prompt=1, index=3)])
    assert (error.reason, error.retryable) == ("artifact_missing", True)
    assert "sample 3 of prompt 1 is missing in the 1 rollout parts of step 3" in str(error)
    two_groups.add([make_rollout(1, 4, [5], [6, 7], "cut")])
    assert "sample 4 of prompt 1 is unfinished" in str(two_groups.failure())


def test_a_missing_part_is_named(two_groups: Workplace, tmp_path: Path) -> None:
    error = two_groups.failure(rollouts=[str(tmp_path / "nowhere.parquet")])
    assert error.reason == "artifact_missing" and "nowhere.parquet" in str(error)


def test_samples_of_a_group_must_stand_together(two_groups: Workplace) -> None:
    error = two_groups.failure(samples=[two_groups.tasks[number] for number in (0, 3, 1, 4)])
    assert error.reason == "bad_request" and "stand together" in str(error)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import time; time.sleep(1000)", "took longer than 1 s"),
        ("raise ValueError('broken')", "raised ValueError: broken (mine.py, line 2)"),
        ("import os; os._exit(3)", "ended its worker process with exit code 3"),
        ("return [float('nan')] * len(completions)", "returned nan as a reward"),
        ("return [1.0]", "returned 1 rewards for 3 responses"),
    ],
)
def test_a_reward_that_fails_ends_the_task_with_nothing_written(
    two_groups: Workplace, tmp_path: Path, body: str, why: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def reward(completions):\n    {body}\n")
    seconds = 1.0 if "sleep" in body else 60.0
    mine = RewardSettings(name="mine", python=PythonReward(file=str(tmp_path / "mine.py")), timeout=seconds)
    error = two_groups.failure(rewards=[mine], old_log_probs=True)
    assert error.reason == "reward_failed"
    assert f"reward 'mine' {why}" in str(error) and "row 0 of the prompts" in str(error)


def test_a_drained_preparer_stops(two_groups: Workplace, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef reward(completions): time.sleep(1000)\n")
    slow = RewardSettings(name="slow", python=PythonReward(file=str(tmp_path / "slow.py")), timeout=1000.0)
    context = make_context()
    context.stop("drain")
    error = two_groups.failure(rewards=[slow], context=context)
    assert (error.reason, error.retryable) == ("drained", True)


def test_a_sink_that_cannot_be_written_is_named(two_groups: Workplace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    error = two_groups.failure(sink=str(tmp_path / "file" / "prepared.parquet"))
    assert error.reason == "artifact_unwritable" and str(tmp_path / "file") in str(error)
