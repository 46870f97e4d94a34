"""Rows that are left out of a dataset, and rows that lack what a reward needs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhfless_functions.data.dataset_files import read_tables
from rlhfless_functions.data.datasets import make_prompts
from rlhfless_functions.data.left_out import check_left_out
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import DataSettings, RewardSettings, SamplingSettings
from rlhfless_functions.settings.rewards import CodeReward, ExactMatchReward, MathReward
from tests.data.reading import chat_tokenizer as chat_tokenizer
from tests.data.reading import counts_of, prompts_of, write_jsonl
from tests.data.reading import tokenizer as tokenizer


@pytest.mark.parametrize(
    "empty",
    [
        "",
        " \n",
        [],
        [{"role": "user", "content": ""}],
        [{"role": "system", "content": "be short"}, {"role": "user", "content": " "}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
    ],
)
def test_every_form_of_an_empty_prompt_is_left_out(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, empty: Any
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": empty}])
    assert [prompt.text for prompt in prompts_of(source, chat_tokenizer)[0]] == ["1"]
    assert counts_of(source, chat_tokenizer) == {"rows": 2, "empty": 1, "first": {"empty": "line 2"}}


def test_every_reason_is_counted_with_its_first_row(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    answered = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    prompts = ["1", "", "1" * 9, answered, "2", "1" * 8, "3", ""]
    rows = [{"prompt": prompt, "answer": None if prompt in ("2", "") else "1"} for prompt in prompts]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    assert counts_of(source, chat_tokenizer, longest=4) == {
        "rows": 8, "too_long": 2, "empty": 2, "answered": 1, "without_ground_truth": 1,
        "first": {"too_long": "line 3", "empty": "line 2", "answered": "line 4", "without_ground_truth": "line 5"},
    }  # fmt: skip


def test_more_than_may_be_left_out_is_an_error(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * length} for length in (1, 8, 9)] + [{"prompt": ""}]
    data = DataSettings(source=write_jsonl(tmp_path / "a.jsonl", rows))
    tables = read_tables(data)
    _, counts = make_prompts(tables, data, SamplingSettings(max_prompt_tokens=4), tokenizer)
    check_left_out(tables, counts, 0.75)
    with pytest.raises(TaskError) as raised:
        check_left_out(tables, counts, 0.5)
    assert str(raised.value) == (
        f"3 of the 4 rows of {data.source} were dropped, more than the share limits.droppedPrompts (0.5):"
        " 2 longer than sampling.maxPromptTokens (first line 2), 1 empty (first line 4). Raise"
        " sampling.maxPromptTokens or shorten the prompts; give the empty rows a prompt or remove them, or raise"
        " limits.droppedPrompts"
    )


MATH = RewardSettings(name="right", math=MathReward())
EXACT = RewardSettings(name="same", exact_match=ExactMatchReward())
CODE = RewardSettings(name="tests", code=CodeReward(tests_column="checks"))


@pytest.mark.parametrize(
    ("rows", "reward", "words"),
    [
        (
            [{"prompt": "1", "answer": "1"}, {"prompt": "2", "level": 3, "answer": None}],
            MATH,
            ["line 2 has no ground truth in column 'answer', which reward 'right' (math) needs; it has prompt, level"],
        ),
        ([{"prompt": "1", "gold": "1"}], EXACT, ["has no ground truth (no column ground_truth,", "'same' (exactMatch)",
                                                 "it has prompt, gold: set data.groundTruthColumn to one of them"]),
        (
            [{"prompt": "1", "checks": ["assert double(1) == 2"]}, {"prompt": "2", "answer": "2"}],
            CODE,
            ["line 2 has no tests that reward 'tests' (code) can use: there are no tests in column 'checks'; set",
             "(the row has prompt, answer; 1 of 2 rows have none)"],
        ),
    ],
    ids=["a row without ground truth", "no ground truth at all", "a row without tests"],
)  # fmt: skip
def test_a_row_that_a_reward_cannot_score_is_found_when_the_data_is_read(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, rows: list[Any], reward: RewardSettings, words: list[str]
) -> None:
    data = DataSettings(source=write_jsonl(tmp_path / "a.jsonl", rows))
    with pytest.raises(TaskError) as raised:
        make_prompts(read_tables(data), data, SamplingSettings(), tokenizer, rewards=[reward])
    assert raised.value.reason == "data_invalid"
    assert all(word in str(raised.value) for word in words), str(raised.value)
    lenient = reward.model_copy(update={"on_error": "unscorable"})
    assert len(make_prompts(read_tables(data), data, SamplingSettings(), tokenizer, rewards=[lenient])[0]) == len(rows)


def test_a_row_that_is_left_out_needs_no_ground_truth(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": "", "answer": None}]
    data = DataSettings(source=write_jsonl(tmp_path / "a.jsonl", rows))
    assert len(make_prompts(read_tables(data), data, SamplingSettings(), tokenizer, rewards=[MATH])[0]) == 1


def test_truths_that_a_reward_can_not_read_are_named_with_their_rows(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    answers = ["4", "3 apples or so", "5", *["many"] * 7]
    data = DataSettings(source=write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": each} for each in answers]))

    def unreadable(kind: str, truths: Sequence[Any]) -> list[tuple[int, str]]:
        assert kind == "math"
        return [(position, "is odd") for position, truth in enumerate(truths) if not truth.isdigit()]

    make = partial(make_prompts, read_tables(data), data, SamplingSettings(max_prompt_tokens=4), tokenizer)
    with pytest.raises(TaskError) as raised:
        make(rewards=[MATH], unreadable=unreadable)
    message = str(raised.value)
    assert f"{data.source} has 8 ground truths in column 'answer' that reward 'right' (math) can't read" in message
    assert "(line 2: '3 apples or so' is odd; line 4: 'many' is odd;" in message and "; and 3 more);" in message
    prompts, _ = make(rewards=[MATH.model_copy(update={"on_error": "unscorable"})], unreadable=unreadable)
    assert len(prompts) == len(answers)
