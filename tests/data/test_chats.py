"""Chats as people have them: content in parts, nulls, tools, JSON texts; and what the model reads of them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlhfless_functions.data.chats import ChatError, PromptForm, read_prompt, render, without_nulls
from rlhfless_functions.data.thoughts import begun_thoughts
from rlhfless_functions.settings import FormatReward, PythonReward, RewardSettings
from tests.data.reading import chat_tokenizer as chat_tokenizer
from tests.data.reading import fault, notes_of, prompts_of, write_jsonl
from tests.data.reading import tokenizer as tokenizer

USER = {"role": "user", "content": "1+1="}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TELLING = (
    "{% if tools %}t:{{ tools | tojson(sort_keys=true) }}\n{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:"
    "{% if 'tool_calls' in m %}calls {{ m.tool_calls | tojson(sort_keys=true) }}{% endif %}"
    "{% if m.name is defined %}({{ m.name }}){% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% if enable_thinking is defined and not enable_thinking %}#{% endif %}{% endif %}"
)
"""A template that asks of every key whether it is there. A table keeps one order of keys for all of its rows."""


def text_of(prompt: Any, tokenizer: PreTrainedTokenizerBase, **row: Any) -> str:
    return render(tokenizer, read_prompt(prompt, PromptForm(), row))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("1+1=", "1+1="),
        ([{"type": "text", "text": "1+1="}], "1+1="),
        ([{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}], "1+1="),
        ([{"type": "input_text", "text": "1+1="}], "1+1="),
        ([{"text": "1+1="}], "1+1="),
        (["1+", "1="], "1+1="),
        ({"type": "text", "text": "1+1="}, "1+1="),
        ([{"type": "text", "text": "1+1=", "image_url": None}], "1+1="),
        ([{"type": "text", "text": None}, {"type": "text", "text": "1"}], "1"),
        (None, ""),
        ([], ""),
    ],
)
def test_the_text_of_parts_is_joined_and_null_is_no_text(
    chat_tokenizer: PreTrainedTokenizerBase, content: Any, text: str
) -> None:
    assert text_of([{"role": "user", "content": content}], chat_tokenizer) == f"u:{text}\na:"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([{"role": "user", "content": [{"type": "image"}]}], "an image in message 1, part 1, but prompts are text"),
        (
            [USER, {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "image_url"}]}],
            "message 2, part",
        ),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "a video"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "an input_audio"),
        ([{"role": "user", "content": [{"type": "file", "text": "1"}]}], "a file"),
        ([{"role": "user", "content": [1]}], "an int"),
        ([{"role": "user", "content": 1}], "as the content of message 1"),
        ([{"role": "user", "text": "1"}], "no content in message 1; it has role, text"),
        ([{"from": "human", "value": "1"}], "rename its keys to role and content"),
        ("[{'role': 'user', 'content': '1'}]", "as Python writes a list"),
        ([{"role": 1, "content": "1"}], "must hold text or a list of chat messages"),
    ],
)
def test_what_is_no_text_is_refused_by_name(prompt: Any, words: str) -> None:
    with pytest.raises(ChatError) as raised:
        read_prompt(prompt, PromptForm())
    assert words in str(raised.value)


@pytest.mark.parametrize("column", ["images", "videos", "audios"])
def test_a_row_with_media_is_refused_unless_there_are_none(column: str) -> None:
    assert read_prompt([USER], PromptForm(), {column: []}).messages == [USER]
    with pytest.raises(ChatError, match=f"has {column}, but prompts are text"):
        read_prompt([USER], PromptForm(), {column: ["a.png"]})


def test_keys_that_are_null_are_not_there_at_any_depth() -> None:
    given = {"a": None, "b": [{"c": None, "d": [None, 1]}], "e": {"f": {"g": None}}}
    assert without_nulls(given) == {"b": [{"d": [None, 1]}], "e": {"f": {}}}


NAMES = st.sampled_from(["a", "b", "city"])
TEXT = st.text("xyz 12", max_size=4)
SCHEMAS = st.fixed_dictionaries({"type": st.just("string")}, optional={"description": TEXT, "enum": st.lists(TEXT)})
TOOL = st.builds(
    lambda name, properties: {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}},
    NAMES,
    st.dictionaries(NAMES, SCHEMAS, min_size=1, max_size=2),
)
CALL = st.builds(
    lambda name, arguments: {"function": {"name": name, "arguments": arguments}},
    NAMES,
    st.dictionaries(NAMES, TEXT, min_size=1, max_size=2),
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}, optional={"cache": st.just("x")}), max_size=2
)


def messages_of(contents: Any) -> Any:
    return st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system"]), "content": contents}, optional={"name": NAMES}
        ),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "tool_calls": st.lists(CALL, min_size=1, max_size=2)},
            optional={"content": st.none() | contents},
        ),
        st.fixed_dictionaries({"role": st.just("tool"), "content": contents}, optional={"tool_call_id": NAMES}),
    )


CHATS = st.sampled_from([TEXT, PARTS]).flatmap(lambda contents: st.lists(messages_of(contents), min_size=1, max_size=4))
ROWS = st.lists(
    st.fixed_dictionaries(
        {"prompt": CHATS.map(lambda chat: [*chat, {"role": "user", "content": chat[0].get("content") or None}])},
        optional={
            "tools": st.lists(TOOL, max_size=2),
            "chat_template_kwargs": st.fixed_dictionaries({}, optional={"enable_thinking": st.booleans()}),
        },
    ),
    min_size=1,
    max_size=3,
)


def _written(write: Any) -> bool:
    """Whether Arrow can hold rows of such forms at all."""
    try:
        write()
    except (pa.ArrowException, TypeError):
        return False
    return True


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=ROWS)
def test_json_lines_and_parquet_give_the_same_prompts(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    chat_tokenizer.chat_template = TELLING
    rows = [*rows, {"prompt": [USER]}]
    table = tmp_path / "a.parquet"
    names = {name for row in rows for name in row}  # Arrow would take the first row's alone.
    if not _written(lambda: pq.write_table(pa.Table.from_pylist([dict.fromkeys(names) | row for row in rows]), table)):
        return
    lines = write_jsonl(tmp_path / "a.jsonl", rows)

    def read(source: str | Path) -> list[tuple[str, Any]]:
        prompts, _ = prompts_of(source, chat_tokenizer, longest=4096)
        return [(prompt.text, prompt.messages) for prompt in prompts]

    assert read(lines) == read(table)


def test_saved_datasets_give_the_same_prompts(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    from datasets import Dataset

    chat_tokenizer.chat_template = TELLING
    called = {"role": "assistant", "tool_calls": [{"name": "weather"}]}
    rows = [{"prompt": [USER, called, {"role": "tool", "content": "rain"}, USER], "tools": [WEATHER["function"]]}]
    Dataset.from_list([*rows, {"prompt": [USER]}]).save_to_disk(tmp_path / "saved")
    saved, _ = prompts_of(tmp_path / "saved", chat_tokenizer, longest=4096)
    lines, _ = prompts_of(write_jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": [USER]}]), chat_tokenizer, longest=4096)
    assert "weather" in lines[0].text and "t:" in lines[0].text
    assert [prompt.text for prompt in saved] == [prompt.text for prompt in lines]


# --- what the template gets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER])])
def test_tools_reach_the_template(chat_tokenizer: PreTrainedTokenizerBase, tools: Any) -> None:
    chat_tokenizer.chat_template = TELLING
    assert text_of([USER], chat_tokenizer, tools=tools).startswith(f"t:{json.dumps([WEATHER], sort_keys=True)}")
    assert text_of([USER], chat_tokenizer, tools=[]) == "u:1+1=\na:"


@pytest.mark.parametrize("arguments", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_a_row_s_template_arguments_come_before_the_job_s(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, arguments: Any
) -> None:
    chat_tokenizer.chat_template = TELLING
    rows = [{"prompt": [USER], "chat_template_kwargs": arguments}, {"prompt": [USER]}]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [prompt.text[-1] for prompt in prompts_of(source, chat_tokenizer)[0]] == ["#", ":"]
    prompts, _ = prompts_of(source, chat_tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert [prompt.text[-1] for prompt in prompts] == ["#", "#"]
    assert notes_of(source, chat_tokenizer) == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tools": "hammer"}, "text in the column tools that is not JSON"),
        ({"tools": ["hammer"]}, "rename the column"),
        ({"tools": {"a": 1}}, "list of tools"),
        ({"chat_template_kwargs": [1]}, "JSON object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "sets tokenize in chat_template_kwargs"),
    ],
)
def test_columns_of_another_meaning_are_refused(row: Any, words: str) -> None:
    with pytest.raises(ChatError) as raised:
        read_prompt([USER], PromptForm(), row)
    assert words in str(raised.value)


def test_what_the_template_does_not_show_is_said(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"prompt": [USER]}, {"prompt": [USER], "tools": [WEATHER], "chat_template_kwargs": {"effort": "low"}}]
    tools, effort = notes_of(write_jsonl(tmp_path / "a.jsonl", rows), chat_tokenizer)
    assert tools == "tools has no effect on prompts (first line 2): the chat template does not mention it"
    assert effort.startswith("effort has no effect")
    (text,) = notes_of(write_jsonl(tmp_path / "b.jsonl", [{"prompt": "1", "tools": [WEATHER]}]), chat_tokenizer)
    assert text == "tools has no effect on prompts (first line 1): the prompt is plain text"


def test_messages_as_a_json_text_are_read_and_said(chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "[1, 2]"}, {"prompt": json.dumps([USER])}])
    text, chat = prompts_of(source, chat_tokenizer)[0]
    assert (text.text, chat.text, chat.messages) == ("[1, 2]", "u:1+1=\na:", [USER])
    note, _ = notes_of(source, chat_tokenizer)
    assert note == "1 prompts are JSON texts of chat messages (first line 2); they were read as messages"


# --- surrogates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "\\ud83d"}',
        '{"prompt": "cut \\uDE00"}',
        '{"prompt": [{"role": "user", "content": "\\ud83d"}]}',
        '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "\\ud83d"}]}]}',
        '{"prompt": "1", "answer": "\\ud83d"}',
        '{"prompt": "1", "answer": ["2", "\\ud83d"]}',
    ],
)
def test_half_of_a_surrogate_pair_is_named_with_its_line(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "a whole one: \\ud83d\\ude00"}}\n{row}\n')
    message = fault(path, chat_tokenizer)
    assert "line 2" in message and "half of a surrogate pair (\\u" in message


# --- thoughts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("a:<think>\n", "<think>\n"),
        ("a:<think>", "<think>"),
        ("a:<reasoning>\n\n", "<reasoning>\n\n"),
        ("a:<|begin_of_thought|>", "<|begin_of_thought|>"),
        ("a:[THINK]", "[THINK]"),
        ("write <think> first\na:", ""),
        ("a:<think></think>", ""),
        ("", ""),
    ],
)
def test_thoughts_are_begun_at_the_end_of_a_prompt_alone(prompt: str, begun: str) -> None:
    assert begun_thoughts(prompt) == begun


def test_begun_thoughts_are_said_with_the_rewards_that_do_not_see_them(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    chat_tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [USER]}])
    form = RewardSettings(name="form", format=FormatReward(pattern=".*"))
    own = RewardSettings(name="own", python=PythonReward(file="r.py"))
    note, _ = notes_of(source, chat_tokenizer, rewards=[form])
    assert note.endswith("format rewards put it before the response")
    assert "functions of your own (own)" in notes_of(source, chat_tokenizer, rewards=[form, own])[0]
