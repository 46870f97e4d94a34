"""The tokens that a chat template puts between turns. Sampled tokens are never rendered or tokenized again.

A template renders whole conversations. To learn what follows a turn, the bridge renders a short conversation with a
marker in the model's place, once with the new messages and once without, and takes what is after the marker. A
template may change earlier turns, for example remove their thoughts. A response keeps every token it has.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_MARK = "rlhflessmark"
_OTHER = "rlhflessother"
_TOOL = "rlhflesstool"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "Does something.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "string", "description": "A value."}},
            "required": ["value"],
        },
    },
}
REMEDY = "set model.chatTemplate to a template that does, such as a training template of TRL"


class BridgeError(ValueError):
    """The chat template can't carry a conversation on; the message says why, and the remedy."""


@dataclass(frozen=True)
class Call:
    """A call of a tool by the model."""

    name: str
    arguments: dict[str, Any]


class Bridge:
    """The chat template's tokens around what environments say.

    Args:
        tokenizer: with the job's template.
        tools: schemas of the tools that prompts show.
        template_arguments: the job's arguments of the template.
        stop_tokens: ids that end a turn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
        stop_tokens: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        self._arguments = dict(template_arguments or {})
        self._stop = frozenset(stop_tokens)
        self._special = sorted(
            {token for token in tokenizer.all_special_tokens if len(token) > 1}
            | {str(each) for each in tokenizer.added_tokens_decoder.values() if each.special and len(str(each)) > 1},
            key=len,
            reverse=True,
        )
        self._texts: dict[str, str] = {}

    @property
    def generation_prompt(self) -> str:
        """The text from the end of a user's message to the beginning of the model's turn.

        Raises:
            BridgeError: the template shows no user's message.
        """
        if "closing" not in self._texts:
            rendered = self._render([{"role": "user", "content": _MARK}], begin=True)
            self._texts["closing"] = self._after(rendered, _MARK, "the user's message")
        return self._texts["closing"]

    def opening(self, text: str) -> list[int]:
        """Return the tokens after a prompt that ends with the user's message: more text for this message, and the
        beginning of the model's turn.

        Raises:
            BridgeError: as for `generation_prompt`.
        """
        return self._tokens(self.plain(text) + self.generation_prompt)

    def after_calls(self, last: int | None, calls: Sequence[Call], results: Sequence[str]) -> list[int]:
        """Return the tokens between a turn that called tools and the next turn.

        Args:
            last: last token of the turn; None if the turn was cut.
            calls: the tools that it called; a call that could not be read has any name.
            results: a text for each.

        Raises:
            BridgeError: the template can't render it.
        """
        turn = _turn_with_calls(len(calls))
        answers: list[Message] = [
            {"role": "tool", "name": call.name, "tool_call_id": f"call{number:05d}", "content": self.plain(result)}
            for number, (call, result) in enumerate(zip(calls, results, strict=True))
        ]
        return self._between(last, turn, answers, _MARK if self._shows_text_beside_calls else _OTHER)

    def after_text(self, last: int | None, text: str) -> list[int]:
        """Return the tokens between a turn and the next, with a user's message between them.

        Args:
            last: last token of the turn; None if the turn was cut.
            text: the user's message.

        Raises:
            BridgeError: the template can't render it.
        """
        turn: Message = {"role": "assistant", "content": _MARK}
        return self._between(last, turn, [{"role": "user", "content": self.plain(text)}], _MARK)

    def plain(self, text: str) -> str:
        """Return a text without the template's control tokens: a space parts their first two characters.

        Otherwise the result of a tool could end its own message.
        """
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def render_call(self, call: Call) -> str:
        """Return a call as the template writes it in the model's turn, up to the end of the turn.

        Raises:
            BridgeError: the template can't render it, or does not show it.
        """
        function = {"name": call.name, "arguments": call.arguments}
        turn = {"role": "assistant", "content": _MARK, "tool_calls": [{"type": "function", "function": function}]}
        prompt: list[Message] = [{"role": "user", "content": "u"}]
        rendered = self._render([*prompt, turn], begin=False)
        if call.name not in rendered:
            raise BridgeError(f"the chat template does not show the model's calls of tools; {REMEDY}")
        if self._shows_text_beside_calls:
            after = self._after(rendered, _MARK, "what the model says beside a call")
        else:
            after = rendered.removeprefix(self._render(prompt, begin=True))
        return after[: self._end_of_turn(after)]

    def shows_tools(self) -> bool:
        """Return whether prompts show the schemas of tools."""
        shown = self._apply([{"role": "user", "content": "u"}], begin=True, tools=[_PROBE_TOOL])
        return _TOOL in shown

    def keeps_history(self, turn: Message, new: Sequence[Message]) -> bool:
        """Return whether the template renders a turn alike before and after new messages."""
        before: list[Message] = [{"role": "user", "content": "u"}, turn]
        first = self._render(before, begin=False)
        return self._render([*before, *new], begin=True).startswith(first[: self._end_of_turn(first)])

    # --- the text after a turn -----------------------------------------------------------------------------------

    @cached_property
    def _shows_text_beside_calls(self) -> bool:
        """Whether a turn that calls tools has text as well. Llama's is the call alone."""
        return _MARK in self._render([{"role": "user", "content": "u"}, _turn_with_calls(1)], begin=False)

    def _between(self, last: int | None, turn: Message, new: Sequence[Message], mark: str) -> list[int]:
        before: list[Message] = [{"role": "user", "content": "u"}, turn]
        alone = self._after(self._render(before, begin=False), mark, "the model's turn")
        whole = self._after(self._render([*before, *new], begin=True), mark, "the model's turn")
        end = self._end_of_turn(alone)
        if not whole.startswith(alone[:end]):
            raise BridgeError(f"the chat template writes a turn's end differently once messages follow it; {REMEDY}")
        tokens = self._tokens(whole[end:])
        # The model sampled the end of its turn itself, in the template's spelling or in another.
        if last is not None and tokens and (tokens[0] == last or (tokens[0] in self._stop and last in self._stop)):
            return tokens[1:]
        return tokens

    def _end_of_turn(self, text: str) -> int:
        """Return where the last stop token of a text begins; the text's length if it has none."""
        places = [text.rfind(self._spelling(token)) for token in self._stop]
        return max((place for place in places if place >= 0), default=len(text))

    def _spelling(self, token: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(token))

    def _after(self, rendered: str, mark: str, part: str) -> str:
        if rendered.count(mark) != 1:
            raise BridgeError(f"the chat template does not show {part} as it is; {REMEDY}")
        return rendered.partition(mark)[2]

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: Sequence[Message], *, begin: bool) -> str:
        return self._apply(messages, begin=begin, tools=self._tools)

    def _apply(self, messages: Sequence[Message], *, begin: bool, tools: list[dict[str, Any]] | None) -> str:
        if not self._tokenizer.chat_template:
            raise BridgeError("the model's tokenizer has no chat template; set model.chatTemplate")
        faults = []
        # Some templates want the arguments of a call as an object, others as its JSON.
        for arguments in (dict, json.dumps):
            try:
                return str(
                    self._tokenizer.apply_chat_template(
                        [_spelled(message, arguments) for message in messages],
                        tools=tools,
                        tokenize=False,
                        add_generation_prompt=begin,
                        **self._arguments,
                    )
                )
            except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
                faults.append(error)
        raise BridgeError(f"the chat template refuses a conversation with tools or turns ({faults[0]}); {REMEDY}")


def _turn_with_calls(count: int) -> Message:
    """Return a turn of the model that says the mark, and calls a tool so often."""
    function = {"name": _TOOL, "arguments": {"value": _OTHER}}
    calls = [{"type": "function", "id": f"call{number:05d}", "function": function} for number in range(count)]
    return {"role": "assistant", "content": _MARK, "tool_calls": calls}


def _spelled(message: Message, arguments: Any) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
