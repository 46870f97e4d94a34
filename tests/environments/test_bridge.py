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
CHATML = {"qwen2_5", "qwen3_instruct_2507", "qwen2_5_training", "qwen3_instruct_2507_training"}
"""Templates that render an earlier turn as it was said: a conversation can be compared with a whole rendering."""


@given(TURNS, st.sampled_from(sorted(CHATML)))
def test_a_conversation_begins_with_all_that_was_there_and_is_what_the_template_renders(
    turns: list[tuple[str, list[Call], str]], name: str
) -> None:
    tokenizer = tokenizer_of(templates()[name])
    bridge = bridge_of(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
    tools = bridge._tools
    first = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer.encode(first, add_special_tokens=False)
    for said, calls, answer in turns:
        call = [{"type": "function", "function": {"name": each.name, "arguments": each.arguments}} for each in calls]
        turn: dict[str, Any] = {"role": "assistant", "content": said}
        before = [*messages, {**turn, "tool_calls": call} if call else turn]
        whole = tokenizer.apply_chat_template(before, tools=tools, tokenize=False)
        sampled = whole[len(tokenizer.decode(tokens)) : whole.rindex("<|im_end|>")]
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
    assert {name for name in verdicts if name.startswith(("qwen3", "nemotron_3"))} <= with_tools
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


@given(st.text(max_size=60))
def test_no_text_of_a_model_raises(text: str) -> None:
    parser = CallParser(make_tokenizer(), [], "")
    for found in (*parser.calls(f"<tool_call>{text}</tool_call>"), *parser.calls(text)):
        assert isinstance(found, Call | Unread)


def test_a_template_without_tools_is_refused_with_the_remedy() -> None:
    from rlhfless_functions.environments.tool_calls import check_tools

    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = make_tokenizer(plain)
    bridge = Bridge(tokenizer, (), {}, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    with pytest.raises(BridgeError, match=r"does not show the schemas of tools; set model.chatTemplate"):
        check_tools(bridge, CallParser(tokenizer, (), ""))
