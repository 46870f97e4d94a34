"""The tokens between turns: a conversation is one sample, and is what the template renders."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.environments.templates import bridge_of, judge, templates, tokenizer_of
from rlhfless_functions.environments.bridge import Bridge, BridgeError, Call
from rlhfless_functions.environments.tool_calls import CallParser, Unread
from tests.environments.chat import make_tokenizer

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda text: "rlhfless" not in text and text == text.strip()
)
CALLS = st.lists(st.builds(Call, st.just("look"), st.dictionaries(st.just("far"), st.integers())), max_size=2)
TURNS = st.lists(st.tuples(WORDS, CALLS, WORDS), min_size=1, max_size=4)
KEEPING = {
    "qwen2_5": "<|im_end|>",
    "qwen2_5_training": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "qwen3_instruct_2507_training": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
}
"""Templates that render an earlier turn as it was said, and how a turn ends. A conversation can be compared with a
whole rendering."""


@given(TURNS, st.sampled_from(sorted(KEEPING)))
def test_a_conversation_begins_with_all_that_was_there_and_is_what_the_template_renders(
    turns: list[tuple[str, list[Call], str]], name: str
) -> None:
    tokenizer = tokenizer_of(templates()[name])
    bridge = bridge_of(tokenizer)
    ending = KEEPING[name]
    end = tokenizer.convert_tokens_to_ids(ending)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
    tools = bridge._tools
    first = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer.encode(first, add_special_tokens=False)
    for said, called, answer in turns:
        # A turn of Llama's is text or one call.
        calls = called[:1] if name.startswith("llama") else called
        call = [{"type": "function", "function": {"name": each.name, "arguments": each.arguments}} for each in calls]
        turn: dict[str, Any] = {"role": "assistant", "content": said}
        before = [*messages, {**turn, "tool_calls": call} if call else turn]
        whole = tokenizer.apply_chat_template(before, tools=tools, tokenize=False)
        sampled = whole[len(tokenizer.decode(tokens)) : whole.rindex(ending)]
        tokens = [*tokens, *tokenizer.encode(sampled, add_special_tokens=False), end]
        if call:
            new = [{"role": "tool", "name": "look", "content": bridge.plain(answer)} for _ in calls]
            following = bridge.after_calls(end, calls, [answer] * len(calls))
        else:
            new = [{"role": "user", "content": bridge.plain(answer)}]
            following = bridge.after_text(end, answer)
        tokens = [*tokens, *following]
        messages = [*before, *new]
        rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(tokens) == rendered


def test_a_truncated_turn_gets_its_end_and_a_turn_that_ended_does_not_get_another() -> None:
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    bridge = Bridge(tokenizer, (), {}, [end])
    assert tokenizer.decode(bridge.after_text(None, "on")).startswith("<|im_end|>\n<|im_start|>user\non")
    assert tokenizer.decode(bridge.after_text(end, "on")).startswith("\n<|im_start|>user\non")


def test_trls_templates_are_one_sample_a_conversation_or_refused_with_the_reason() -> None:
    verdicts = {name: judge(name, template) for name, template in templates().items()}
    with_tools = {name for name, verdict in verdicts.items() if verdict.tools == "one sample"}
    families = ("qwen3", "nemotron_3", "llama3_1", "llama3_2", "glm4")
    assert {name for name in verdicts if name.startswith(families)} <= with_tools
    refused = {name: verdict.text for name, verdict in verdicts.items() if verdict.text != "one sample"}
    assert set(refused) == {name for name in verdicts if name.startswith(("idefics3", "llava_next", "smolvlm"))}, (
        "templates of images want lists of parts"
    )
    assert all("chat template" in why for why in refused.values())
    assert all("chat template" in verdict.tools for name, verdict in verdicts.items() if name not in with_tools)
    assert verdicts["qwen3"].rewrites and not verdicts["qwen3_training"].rewrites


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>', [Call("a", {"x": 1})]),
        ('<tool_call>\n{"name": "a", "arguments": "{\\"x\\": 1}"}\n</tool_call>', [Call("a", {"x": 1})]),
        ('<think><tool_call>{}</tool_call></think>so <tool_call>{"name": "a"}</tool_call>', [Call("a", {})]),
        ('<tool_call>{"name": "a", "arguments": {}}', [Call("a", {})]),
        ("<tool_call><function=a>\n<parameter=x>\n7\n</parameter>\n</function></tool_call>", [Call("a", {"x": 7})]),
        ("<tool_call><function=a>\n<parameter=s>\n7\n</parameter>\n</function></tool_call>", [Call("a", {"s": "7"})]),
        ("no call at all", []),
    ],
)
def test_calls_are_read(written: str, expected: list[Call]) -> None:
    properties = {"x": {"type": "integer"}, "s": {"type": "string"}}
    schema = {"type": "function", "function": {"name": "a", "parameters": {"properties": properties}}}
    assert CallParser(make_tokenizer(), [schema], "").calls(written) == expected


def test_keys_and_values_of_glm_are_read_in_the_types_of_the_schema() -> None:
    properties = {"x": {"type": "integer"}, "s": {"type": "string"}}
    schema = {"type": "function", "function": {"name": "a", "parameters": {"properties": properties}}}
    parser = CallParser(tokenizer_of(templates()["glm4moe"]), [schema], "")
    keys = "\n<arg_key>x</arg_key>\n<arg_value>7</arg_value>\n<arg_key>s</arg_key>\n<arg_value>7</arg_value>\n"
    assert parser.calls(f"so <tool_call>a{keys}</tool_call><tool_call>b</tool_call>") == [
        Call("a", {"x": 7, "s": "7"}),
        Call("b", {}),
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"name": "a", "parameters": {"x": 1}}', [Call("a", {"x": 1})]),
        ('<|python_tag|>{"name": "a", "arguments": {}}', [Call("a", {})]),
        ('{"answer": 7}', []),
        ("{7} is the answer", []),
        ("I say a", []),
        ('{"name": "a", "parameters": {"x"', [Unread]),
        ('{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', [Unread]),
        ('{"name": "a", "parameters": 3}', [Unread]),
        ('{"name": "a", "parameters": ' + '{"x":' * 5000, [Unread]),
    ],
)
def test_a_turn_of_llama_is_one_call_or_text(written: str, expected: list[Any]) -> None:
    found = CallParser(tokenizer_of(templates()["llama3_1"]), [], "").calls(written)
    assert [Unread if isinstance(each, Unread) else each for each in found] == expected


@given(st.text(max_size=60), st.sampled_from(["qwen2_5", "glm4moe", "llama3_1"]))
def test_no_text_of_a_model_raises(text: str, name: str) -> None:
    parser = CallParser(tokenizer_of(templates()[name]), [], "")
    for found in (*parser.calls(f"<tool_call>{text}</tool_call>"), *parser.calls(text), *parser.calls(f"{{{text}")):
        assert isinstance(found, Call | Unread)


def test_a_template_without_tools_is_refused_with_the_remedy() -> None:
    from rlhfless_functions.environments.tool_calls import check_tools

    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = make_tokenizer(plain)
    bridge = Bridge(tokenizer, (), {}, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    with pytest.raises(BridgeError, match=r"does not show the schemas of tools; set model.chatTemplate"):
        check_tools(bridge, CallParser(tokenizer, (), ""))
