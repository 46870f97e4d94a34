"""Datasets as users have them, made into prompts; and every fault named where it is."""

import gzip
import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from rlhfless_functions import artifacts
from rlhfless_functions.api import DataCounts
from rlhfless_functions.data.prompts import publish_prompts, read_prompts
from tests.data.reading import chat_tokenizer as chat_tokenizer
from tests.data.reading import counts_of, fault, notes_of, prompts_of, write_jsonl
from tests.data.reading import tokenizer as tokenizer

ROWS = [{"prompt": "1+1=", "answer": "2", "level": 1}, {"prompt": "2+2=", "answer": "4", "level": 2}]


# --- forms -------------------------------------------------------------------------------------------------------


def save_jsonl(folder: Path) -> str:
    return write_jsonl(folder / "data.jsonl", ROWS)


def save_gzip(folder: Path) -> str:
    (folder / "data.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    return str(folder / "data.jsonl.gz")


def save_parquet(folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "data.parquet")
    return str(folder / "data.parquet")


def save_dataset(folder: Path) -> str:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return str(folder / "saved")


def save_dataset_with_splits(folder: Path) -> str:
    from datasets import Dataset, DatasetDict

    splits = DatasetDict(test=Dataset.from_list(ROWS[:1]), train=Dataset.from_list(ROWS))
    splits.save_to_disk(folder / "splits")
    return str(folder / "splits")


@pytest.mark.parametrize("save", [save_jsonl, save_gzip, save_parquet, save_dataset, save_dataset_with_splits])
def test_every_form_gives_the_same_prompts(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, save: Any) -> None:
    prompts, dropped = prompts_of(save(tmp_path), tokenizer)
    assert dropped == 0
    assert [(prompt.row, prompt.text, prompt.ground_truth) for prompt in prompts] == [
        (0, "1+1=", "2"),
        (1, "2+2=", "4"),
    ]
    assert prompts[1].columns == {"prompt": "2+2=", "answer": "4", "level": 2}
    assert prompts[1].tokens == tokenizer("2+2=")["input_ids"]


@pytest.mark.parametrize("save", [save_jsonl, save_parquet])
def test_a_dataset_may_be_in_any_store(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, s3: str, save: Any) -> None:
    path = save(tmp_path)
    for store in (s3, "memory://datasets"):
        uri = artifacts.join(store, Path(path).name)
        artifacts.write_bytes(uri, Path(path).read_bytes())
        assert [prompt.text for prompt in prompts_of(uri, tokenizer)[0]] == ["1+1=", "2+2="]


def test_the_format_may_be_told(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "data.txt", ROWS)
    assert len(prompts_of(source, tokenizer, format="jsonl")[0]) == 2
    assert "set data.format" in fault(source, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"prompt": "1"}\n\n{"prompt": \n', ["line 3", "is not JSON"]),
        ("a.jsonl", '{"prompt": "1"}\n["2"]\n', ["line 2", "holds list, not a JSON object"]),
        ("a.jsonl", '{"prompt": "\xff"}', ["line 1", "is not JSON"]),
        ("a.jsonl", "", ["is empty"]),
        ("a.jsonl", "\n \n", ["is empty"]),
        ("a.parquet", "not parquet", ["not a readable Parquet"]),
        ("a.jsonl.gz", "not gzip", ["not a readable gzip"]),
        ("a.xlsx", "prompt\n1\n", ["no file of JSON lines", "data.format"]),
        ("a.csv", "prompt,b\n1,2,3\n", ["line 2 has more cells"]),
        ("a.jsonl", '[{"prompt": "1"}, 2]', ["item 1 of its list holds int"]),
        ("a.arrow", "x", ["not a readable Arrow file"]),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str, content: str, words: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    message = fault(path, tokenizer)
    assert all(word in message for word in [str(path), *words]), message


@pytest.mark.parametrize("source", ["missing.jsonl", "missing.parquet", "missing"])
def test_a_missing_source_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, source: str) -> None:
    message = fault(tmp_path / source, tokenizer)
    assert "data.source" in message and str(tmp_path / source) in message and "does not exist" in message


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "saved"])
def test_a_missing_bucket_is_named(tokenizer: PreTrainedTokenizerBase, s3: str, name: str) -> None:
    message = fault(f"s3://no-such-bucket/{name}", tokenizer)
    assert (
        f"data.source: s3://no-such-bucket/{name} does not exist: the bucket no-such-bucket cannot be found" in message
    )


# --- columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "settings", "text", "truth"),
    [
        ({"question": "1+1=", "solution": "2"}, {}, "1+1=", "2"),
        ({"problem": "1+1=", "solution": "2"}, {}, "1+1=", "2"),
        ({"problem": "1+1=", "answer": "2", "solution": "so 2"}, {}, "1+1=", "2"),
        ({"problem": "other", "question": "1+1="}, {}, "1+1=", None),
        ({"problem": "1+1=", "expected_answer": "2", "generated_solution": "so 3"}, {}, "1+1=", "2"),
        ({"question": "1+1=", "final_answer": ["2"], "solution": ["so 2"]}, {}, "1+1=", ["2"]),
        ({"question": "1+1=", "reference_answer": "2", "answer": "so 3"}, {}, "1+1=", "2"),
        ({"question": "1+1=", "correct_answer": "2"}, {}, "1+1=", "2"),
        ({"question": "1+1=", "gt_answer": 2}, {}, "1+1=", 2),
        ({"prompt": "1+1=", "question": "other", "label": 2}, {}, "1+1=", 2),
        ({"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}, {}, "1+1=", "2"),
        ({"prompt": "1+1=", "reward_spec": {"ground_truth": ["2"]}}, {}, "1+1=", ["2"]),
        ({"prompt": "1+1=", "ground_truth": "2", "answer": "3"}, {}, "1+1=", "2"),
        ({"prompt": "1+1=", "x": {"y": "2"}}, {"ground_truth_column": "x.y"}, "1+1=", "2"),
        (
            {"prompt": "1+1=", "task": "2+2=", "sum": 4},
            {"prompt_column": "task", "ground_truth_column": "sum"},
            "2+2=",
            4,
        ),
        ({"prompt": "1+1="}, {}, "1+1=", None),
    ],
)
def test_columns_are_found_under_the_names_users_know(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row: Any, settings: Any, text: str, truth: Any
) -> None:
    ((prompt,), _) = prompts_of(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer, **settings)
    assert (prompt.text, prompt.ground_truth) == (text, truth)


def test_of_several_usual_names_the_one_that_counts_is_told(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(
        tmp_path / "a.jsonl", [{"question": "1+1=", "problem": "2+2=", "answer": "2", "solution": "4"}]
    )
    prompt, truth = notes_of(source, tokenizer)
    assert prompt == (
        "the prompt is column 'question'; 'problem' could be it too: set data.promptColumn to say which one it is"
    )
    assert truth.startswith(
        "the ground truth is column 'answer'; 'solution' could be it too: set data.groundTruthColumn"
    )
    assert notes_of(source, tokenizer, prompt_column="problem", ground_truth_column="solution") == []
    empty = write_jsonl(tmp_path / "b.jsonl", [{"prompt": None, "question": "1+1=", "answer": "2"}])
    assert notes_of(empty, tokenizer) == [], "a column without a value is none"


def test_chats_that_hold_the_answers_are_the_prompt_only_if_nothing_else_is(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """NuminaMath's and OpenR1-Math's rows have `messages` with the answer, and `problem`."""
    answered = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    row = {"problem": "1+1=", "solution": "2", "messages": answered}
    source = write_jsonl(tmp_path / "a.jsonl", [row])
    ((prompt,), _) = prompts_of(source, chat_tokenizer)
    assert prompt.text == "1+1="
    (note,) = notes_of(source, chat_tokenizer)
    assert note.startswith("the prompt is column 'problem'; 'messages' could be it too: set data.promptColumn")
    ((prompt,), _) = prompts_of(source, chat_tokenizer, answered_prompts="continue")
    assert prompt.text == "u:1\na:2"
    some = write_jsonl(tmp_path / "b.jsonl", [row, {**row, "messages": answered[:1]}])
    ((prompt,), dropped) = prompts_of(some, chat_tokenizer)
    assert (prompt.text, dropped) == ("u:1\na:", 1)
    alone = write_jsonl(tmp_path / "c.jsonl", [{"messages": answered, "question": None}])
    assert "1 ending with the assistant's message" in fault(alone, chat_tokenizer)


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"text": "1"}, {}, ["no prompt column", "it has text", "data.promptColumn"]),
        ({"prompt": "1"}, {"prompt_column": "promt"}, ["no column 'promt'", "it has prompt", "data.promptColumn"]),
        ({"prompt": "1"}, {"ground_truth_column": "gold"}, ["no column 'gold'", "data.groundTruthColumn"]),
        ({"prompt": 1}, {}, ["line 1", "must hold text or a list of chat messages", "holds 1"]),
        ({"prompt": ""}, {}, ["line 1", "no row of", "1 empty", "Give the empty rows a prompt or remove them"]),
        ({"prompt": None, "question": 1}, {}, ["line 1", "must hold text"]),
        ({"prompt": [{"text": "1"}]}, {}, ["line 1", "with role and content"]),
    ],
)
def test_a_column_that_is_missing_or_of_no_use_is_named(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row: Any, settings: Any, words: list[str]
) -> None:
    message = fault(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer, **settings)
    assert all(word in message for word in words), message


def test_a_row_without_a_prompt_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    message = fault(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}, {"answer": "2"}]), tokenizer)
    assert "line 2" in message and "'prompt'" in message


def test_columns_that_json_lacks_become_text_or_are_left_out(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    row = {"prompt": "1", "when": datetime(2026, 1, 2), "price": Decimal("1.50"), "image": b"\x89PNG", "tags": ["a"]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    ((prompt,), _) = prompts_of(tmp_path / "a.parquet", tokenizer)
    assert prompt.columns == {"prompt": "1", "when": "2026-01-02T00:00:00", "price": 1.5, "tags": ["a"]}


def test_the_same_prompt_twice_is_two_rows(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "3"}]
    prompts, _ = prompts_of(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer)
    assert [(prompt.row, prompt.ground_truth) for prompt in prompts] == [(0, "2"), (1, "3")]


# --- chat --------------------------------------------------------------------------------------------------------


def test_messages_go_through_the_chat_template(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "1+1="}]}]
    ((prompt,), _) = prompts_of(write_jsonl(tmp_path / "a.jsonl", rows), chat_tokenizer)
    assert prompt.text == "u:1+1=\na:"
    assert prompt.tokens == chat_tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert prompt.messages == rows[0]["messages"]


def test_an_assistants_last_message_is_continued(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "it is"}]
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": messages}])
    ((prompt,), _) = prompts_of(source, chat_tokenizer, answered_prompts="continue")
    assert prompt.text == "u:1+1=\na:it is"


def test_a_chat_that_ends_with_the_answer_is_no_prompt(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    asked = {"role": "user", "content": "1+1="}
    rows = [{"prompt": [asked]}, {"prompt": [asked, {"role": "assistant", "content": "2"}]}]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    ((prompt,), _) = prompts_of(source, chat_tokenizer)
    assert prompt.text == "u:1+1=\na:"
    assert counts_of(source, chat_tokenizer) == {"rows": 2, "answered": 1, "first": {"answered": "line 2"}}
    message = fault(source, chat_tokenizer, answered_prompts="fail")
    assert "line 2 ends with the assistant's message, as do 1 of 2 rows" in message
    message = fault(write_jsonl(tmp_path / "b.jsonl", rows[1:]), chat_tokenizer)
    assert "no row of" in message and "set data.answeredPrompts to continue if they are beginnings" in message


def test_a_system_prompt_makes_messages_of_text(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1="}])
    ((prompt,), _) = prompts_of(source, chat_tokenizer, system_prompt="be short")
    assert prompt.text == "s:be short\nu:1+1=\na:"
    assert prompt.messages is not None and prompt.messages[0] == {"role": "system", "content": "be short"}
    ((prompt,), _) = prompts_of(source, chat_tokenizer)
    assert (prompt.text, prompt.messages) == ("1+1=", None)


def test_a_second_system_message_is_refused(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "system", "content": "be long"}]}])
    assert "has a system message of its own" in fault(source, chat_tokenizer, system_prompt="be short")


def test_chat_data_for_a_model_without_a_template_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    message = fault(write_jsonl(tmp_path / "a.jsonl", [{"prompt": messages}]), tokenizer)
    assert "line 1" in message and "no chat template; set model.chatTemplate" in message
    assert "no chat template" in fault(save_jsonl(tmp_path), tokenizer, system_prompt="be short")


def test_messages_that_the_template_refuses_are_named(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    rows = [{"prompt": "1"}, {"prompt": [{"role": "user", "content": "1"}]}]
    message = fault(write_jsonl(tmp_path / "a.jsonl", rows), chat_tokenizer)
    assert "line 2" in message and "roles must alternate" in message


def test_special_tokens_are_added_to_text_but_not_to_what_a_template_wrote(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    eos = chat_tokenizer.eos_token_id
    chat_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", eos)]
    )
    rows = [{"prompt": "1"}, {"prompt": [{"role": "user", "content": "1"}]}]
    (text, chat), _ = prompts_of(write_jsonl(tmp_path / "a.jsonl", rows), chat_tokenizer)
    assert text.tokens[0] == eos and eos not in chat.tokens


def test_plain_prompts_that_special_tokens_spoil_are_told(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    chat_tokenizer.bos_token = chat_tokenizer.pad_token
    begin, end = chat_tokenizer.bos_token, chat_tokenizer.eos_token
    chat_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}",
        special_tokens=[(begin, chat_tokenizer.bos_token_id), (end, chat_tokenizer.eos_token_id)],
    )
    chat = [{"role": "user", "content": "1"}]
    rows = [{"prompt": chat}, {"prompt": "1"}, {"prompt": f"{begin}2"}]
    first, second = notes_of(write_jsonl(tmp_path / "a.jsonl", rows), chat_tokenizer)
    assert first.startswith("2 prompts end in <eos> (first line 2), so the model answers after the end of a text")
    assert second.startswith("1 prompts begin with two <pad> (first line 3)")


# --- lengths -----------------------------------------------------------------------------------------------------


def test_long_prompts_are_dropped_and_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * length, "n": length} for length in (5, 3, 9, 4)]
    prompts, dropped = prompts_of(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, longest=4)
    assert dropped == 2
    assert [(prompt.row, prompt.columns["n"]) for prompt in prompts] == [(0, 3), (1, 4)]


def test_long_prompts_may_be_an_error(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * length} for length in (3, 5, 9)]
    message = fault(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, longest=4, long_prompts="fail")
    assert "line 2 has a prompt of 5 tokens" in message
    assert "2 of 3 prompts have more than sampling.maxPromptTokens (4)" in message


def test_dropping_every_prompt_is_an_error(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": "1" * length} for length in (7, 5)]
    message = fault(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, longest=4)
    assert "longer than sampling.maxPromptTokens (4; the shortest has 5 tokens)" in message


def test_a_prompt_that_leaves_no_room_in_the_context_is_an_error(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1" * 24}, {"prompt": "1" * 25}])
    message = fault(source, tokenizer, positions=32)
    assert "line 2 has a prompt of 25 tokens" in message and "the model's 32 positions" in message
    assert len(prompts_of(source, tokenizer, positions=33)[0]) == 2


def test_a_published_dataset_has_prompts_for_the_functions_and_an_index_for_the_control_plane(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    prompts, _ = prompts_of(save_jsonl(tmp_path), tokenizer)
    uri = str(tmp_path / "published")
    counts = DataCounts(rows=5, too_long=2, empty=1)
    publish_prompts(uri, prompts, counts)
    assert read_prompts(uri) == prompts
    index = {"prompts": 2, "dropped": 3, "counts": counts.model_dump(), "lengths": [4, 4], "prefixes": None}
    assert artifacts.read_json(artifacts.join(uri, "index.json")) == index
