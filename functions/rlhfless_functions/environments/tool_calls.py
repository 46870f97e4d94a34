"""Tool calls in what a model wrote. A call that can't be read is a fault that the model is told, never an error."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhfless_functions.environments.bridge import REMEDY, Bridge, BridgeError, Call

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", re.DOTALL)
_XML = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_KEYED = re.compile(r"\s*([^\s<]+)((?:\s*<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>)*)\s*", re.DOTALL)
_KEY = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_THOUGHTS = re.compile(r".*</think>", re.DOTALL)
_LONGEST = 200


@dataclass(frozen=True)
class Unread:
    """A call that can't be read."""

    reason: str
    """The fault, for the model."""


class CallParser:
    """Reads the calls of a turn in the form that the checkpoint's `response_template` describes. Without one, the chat
    template shows the form: JSON, XML or GLM's keys and values within `<tool_call>`, or Llama's turn that is one call.

    Args:
        tokenizer: the model's.
        tools: schemas of the tools.
        generation_prompt: the text before each turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], generation_prompt: str
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._prefix = generation_prompt
        self._template = getattr(tokenizer, "response_template", None)
        shown = str(tokenizer.chat_template)
        self._keyed = "<arg_key>" in shown
        self.takes_one = self._template is None and "<tool_call>" not in shown
        """Whether a turn has one call at most, as JSON without anything around it (Llama 3)."""

    def calls(self, text: str) -> list[Call | Unread]:
        """Return the calls in a turn, in their order.

        Args:
            text: the turn with its special tokens, but without the token that ended it.
        """
        if self._template is not None:
            return self._by_template(text)
        # Thoughts may talk of calls.
        said = _THOUGHTS.sub("", text, count=1)
        if self.takes_one:
            return _only_call(said.strip().removeprefix("<|python_tag|>"))
        return [self._read(match[1]) for match in _BLOCK.finditer(said)]

    def _by_template(self, text: str) -> list[Call | Unread]:
        try:
            message = self._tokenizer.parse_response(text, prefix=self._prefix, tools=self._tools or None)
        except Exception as error:  # a parser of the checkpoint's own, given a model's text
            return [Unread(f"the call could not be read ({_short(str(error))})")]
        found: list[Call | Unread] = []
        for call in message.get("tool_calls") or []:
            function = call.get("function") or call
            found.append(_call(function.get("name"), function.get("arguments")))
        return found

    def _read(self, block: str) -> Call | Unread:
        if match := _XML.fullmatch(block):
            return self._named(match[1], _PARAMETER.findall(match[2]))
        if self._keyed and (match := _KEYED.fullmatch(block)):
            return self._named(match[1], _KEY.findall(match[2]))
        try:
            value = json.loads(block)
        except (ValueError, RecursionError) as error:
            return Unread(f"the call is not JSON ({_short(str(error))})")
        if not isinstance(value, dict):
            return Unread("the call is not a JSON object with name and arguments")
        return _call(value.get("name"), value.get("arguments", {}))

    def _named(self, tool: str, arguments: Sequence[tuple[str, str]]) -> Call:
        return Call(tool, {name: self._typed(tool, name, value) for name, value in arguments})

    def _typed(self, tool: str, name: str, value: str) -> Any:
        """Return a parameter written as text in its type: XML does not say which one it is."""
        for each in self._tools:
            if each["function"]["name"] == tool:
                kind = each["function"]["parameters"].get("properties", {}).get(name, {}).get("type")
                if kind == "string":
                    return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value


def check_tools(bridge: Bridge, parser: CallParser) -> None:
    """Check that the template shows tools and their results, and that the parser reads the calls that it writes.

    Raises:
        BridgeError: they don't.
    """
    if not bridge.shows_tools():
        raise BridgeError(f"the chat template does not show the schemas of tools; {REMEDY}")
    most = 1 if parser.takes_one else 2
    bridge.after_calls(None, [Call("probe", {})] * most, ["result"] * most)
    call = Call("rlhflesscall", {"first": "a", "second": 7})
    written = bridge.render_call(call)
    if parser.calls(written) != [call]:
        raise BridgeError(
            "calls of tools in the form of this chat template can't be read; give a tokenizer with a response_template"
            " (model.tokenizer), or set model.chatTemplate to a template that writes calls as JSON in <tool_call>"
        )


def _only_call(text: str) -> list[Call | Unread]:
    """Return the call that a whole turn is; none if the turn is text, or JSON that calls nothing."""
    if not text.startswith("{"):
        return []
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        return [Unread(f"the call is not JSON ({_short(str(error))})")] if text.startswith('{"name"') else []
    arguments = value.get("parameters", value.get("arguments"))
    if "name" not in value or arguments is None:
        return []
    if text[end:].strip():
        return [Unread("a turn has one call, and nothing after it")]
    return [_call(value["name"], arguments)]


def _call(name: Any, arguments: Any) -> Call | Unread:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return Unread("the call's arguments are not a JSON object")
    if not isinstance(name, str) or not name:
        return Unread("the call has no name")
    if not isinstance(arguments, dict):
        return Unread("the call's arguments are not a JSON object")
    return Call(name, arguments)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
