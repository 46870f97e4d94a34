"""The preparation stage on a tiny model: what it writes for the learner, and how it fails."""

import math
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import SampleTask, TrainingProgress
from rlhfless_functions.data.prompts import read_prompts
from rlhfless_functions.data.rollouts import VersionSpan
from rlhfless_functions.preparation import stage
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import AlgorithmSettings, FormatReward, PythonReward, RewardSettings, SamplingSettings
from tests.preparation.batches import EOS, KL, RIGHT, BatchFolder, make_context, make_rollout
from tests.preparation.batches import place as place  # The fixtures.
from tests.preparation.batches import preparer as preparer
from tests.preparation.batches import two_groups as two_groups

# --- materialising -----------------------------------------------------------------------------------------------


def test_a_dataset_is_materialised_once_for_all_functions(place: BatchFolder) -> None:
    result = place.materialize([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1" * 65}, {"prompt": "2"}])
    assert (result.prompts, result.dropped, result.uri) == (2, 1, str(place.folder / "prompts"))
    prompts = read_prompts(result.uri)
    assert [prompt.text for prompt in prompts] == ["1+1=", "2"]
    assert artifacts.read_json(artifacts.join(result.uri, "index.json"))["lengths"] == [4, 1]


def test_chat_data_uses_the_jobs_template(place: BatchFolder) -> None:
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
def test_bad_data_publishes_nothing(place: BatchFolder, rows: list[Any], settings: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words) as raised:
        place.materialize(rows, **settings)
    assert raised.value.reason == "data_invalid"
    assert not (place.folder / "prompts").exists()


# --- rewards and advantages --------------------------------------------------------------------------------------


def test_groups_are_scored_and_compared_within_themselves(two_groups: BatchFolder) -> None:
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


def test_each_group_says_what_sampled_its_tokens(place: BatchFolder) -> None:
    place.materialize([{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}])
    of_one, of_two, last = (make_rollout(*key, [5, 6], [7, 8, EOS]) for key in ((0, 0), (0, 1), (1, 0)))
    of_two.versions = [VersionSpan(1, 0, 2), VersionSpan(3, 2, 3)]
    place.add([of_one, of_two, last])
    result, _ = place.prepare()
    told = [[(each.version, each.tokens) for each in group.sampled] for group in result.groups]
    assert told == [[(1, 2), (2, 3), (3, 1)], [(2, 3)]]
    assert [group.switched_responses for group in result.groups] == [1, 0]


def test_the_same_prompt_text_twice_is_two_groups(place: BatchFolder) -> None:
    place.materialize([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "3"}])
    place.generate({0: ["2", "2"], 1: ["2", "3"]})
    result, samples = place.prepare()
    assert [sample.reward for sample in samples] == [1, 1, 0, 1]
    assert [group.spread for group in result.groups] == [0.0, pytest.approx(math.sqrt(0.5))]
    assert all(advantage == 0 for sample in samples[:2] for advantage in sample.advantages or [1])


def test_token_ids_come_from_the_engine_never_from_text(place: BatchFolder) -> None:
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


def test_rewards_see_columns_and_decoded_text(place: BatchFolder, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(prompts, completions, completion_ids, level, ground_truth, trainer_state):\n"
        "    assert prompts == ['1+1='] * 2 and completions == ['2', '33'] and level == [7, 7]\n"
        "    assert ground_truth == ['2', '2'] and trainer_state.global_step == 2\n"
        "    return [len(ids) for ids in completion_ids]\n"
    )
    place.materialize([{"prompt": "1+1=", "answer": "2", "level": 7}])
    place.generate({0: ["2", "33"]})
    mine = RewardSettings(name="mine", python=PythonReward(file=str(tmp_path / "mine.py")))
    samples = place.prepare(rewards=[mine], progress=TrainingProgress(finished=2, total=3))[1]
    assert [sample.reward for sample in samples] == [2.0, 3.0]


def test_unscorable_samples_are_out_of_the_baseline_and_of_the_loss(place: BatchFolder, tmp_path: Path) -> None:
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


def test_truncated_samples_are_masked_only_where_asked(place: BatchFolder) -> None:
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


def test_an_evaluation_is_scored_and_nothing_more(two_groups: BatchFolder) -> None:
    result, samples = two_groups.prepare(
        purpose="evaluation", old_log_probs=True, reference=two_groups.initial, algorithm=AlgorithmSettings(kl=KL)
    )
    assert [group.reward for group in result.groups] == [pytest.approx(1 / 3)] * 2
    assert {sample.advantages is sample.old_log_probs is sample.reference_log_probs is None for sample in samples} == {
        True
    }


def test_the_samples_that_are_asked_for_come_back_as_text(place: BatchFolder) -> None:
    place.materialize([{"prompt": f"{row}+1=", "answer": str(row + 1)} for row in range(9)])
    place.generate({8: ["9"], 0: ["1", "2"], 7: ["7", "8"]})
    asked = [SampleTask(prompt=7, index=1), SampleTask(prompt=0, index=0)]
    for purpose in ("evaluation", "training"):
        examples = place.prepare(purpose=purpose, examples=asked)[0].examples
        assert [(each.row, each.index, each.prompt, each.response, each.reward, each.tokens) for each in examples] == [
            (0, 0, "0+1=", "1", 1.0, 2),
            (7, 1, "7+1=", "8", 1.0, 2),
        ]
        assert [each.terms for each in examples] == [{"right": 1.0}] * 2
        assert {each.version for each in examples} == {2}
        assert all((each.advantage is None) == (purpose == "evaluation") for each in examples)
    assert place.prepare()[0].examples == []


def test_of_a_very_long_text_the_beginning_and_the_end_come_back(
    place: BatchFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "_LONGEST_TEXT", 8)
    place.materialize([{"prompt": "1+1=", "answer": "2"}])
    place.generate({0: ["0123456789"]})
    (sample,) = place.prepare(examples=[SampleTask(prompt=0, index=0)])[0].examples
    assert sample.prompt == "1+1="
    assert sample.response == "0123\n[… 2 characters left out …]\n6789"


def test_how_a_step_is_cut_into_chunks_changes_nothing(two_groups: BatchFolder) -> None:
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


def test_metrics_are_sums_and_counts(two_groups: BatchFolder) -> None:
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


def test_the_metrics_of_each_group_add_up_to_those_of_the_chunk(two_groups: BatchFolder) -> None:
    result, _ = two_groups.prepare()
    assert [group.metrics for group in result.groups] == [{}, {}], "they were not asked for"
    result, _ = two_groups.prepare(metrics_by_group=True)
    for name, value in result.metrics.items():
        assert value == pytest.approx(sum(group.metrics[name] for group in result.groups)), name
    assert [group.metrics["lengths/count"] for group in result.groups] == [3, 3]


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_missing_or_unfinished_sample_is_named(two_groups: BatchFolder) -> None:
    error = two_groups.failure(samples=[*two_groups.tasks, SampleTask(prompt=1, index=3)])
    assert (error.reason, error.retryable) == ("artifact_missing", True)
    assert "sample 3 of prompt 1 is missing in the 1 rollout parts of step 3" in str(error)
    two_groups.add([make_rollout(1, 4, [5], [6, 7], "cut")])
    assert "sample 4 of prompt 1 is unfinished" in str(two_groups.failure())


def test_a_missing_part_is_named(two_groups: BatchFolder, tmp_path: Path) -> None:
    error = two_groups.failure(rollouts=[str(tmp_path / "nowhere.parquet")])
    assert error.reason == "artifact_missing" and "nowhere.parquet" in str(error)


def test_samples_of_a_group_must_stand_together(two_groups: BatchFolder) -> None:
    error = two_groups.failure(samples=[two_groups.tasks[number] for number in (0, 3, 1, 4)])
    assert error.reason == "bad_request" and "next to each other" in str(error)


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
    two_groups: BatchFolder, tmp_path: Path, body: str, why: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def reward(completions):\n    {body}\n")
    seconds = 1.0 if "sleep" in body else 60.0
    mine = RewardSettings(name="mine", python=PythonReward(file=str(tmp_path / "mine.py")), timeout=seconds)
    error = two_groups.failure(rewards=[mine], old_log_probs=True)
    assert error.reason == "reward_failed"
    assert f"reward 'mine' {why}" in str(error) and "row 0 of the prompts" in str(error)


def test_a_drained_preparer_stops(two_groups: BatchFolder, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef reward(completions): time.sleep(1000)\n")
    slow = RewardSettings(name="slow", python=PythonReward(file=str(tmp_path / "slow.py")), timeout=1000.0)
    context = make_context()
    context.stop("drain")
    error = two_groups.failure(rewards=[slow], context=context)
    assert (error.reason, error.retryable) == ("drained", True)


def test_a_sink_that_cannot_be_written_is_named(two_groups: BatchFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    error = two_groups.failure(sink=str(tmp_path / "file" / "prepared.parquet"))
    assert error.reason == "artifact_unwritable" and str(tmp_path / "file") in str(error)
