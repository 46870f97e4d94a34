"""Prompts as the model reads them: plain text, or chat messages in the form that templates understand.

Training, `rlhfless try-reward`, `rlhfless sample` and `rlhfless validate --data` all make their prompts here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhfless_functions.data.rows import Row, surrogate_fault

Message = dict[str, Any]

TOOLS = "tools"
"""Column of the tools that a row's chat template shows, as in TRL."""
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""Column of a row's arguments for the chat template, as in TRL."""
_RESERVED = frozenset(
    {"conversation", "messages", "tools", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "return_dict", "return_tensors", "tokenizer_kwargs", "padding", "truncation"}
)
MEDIA = ("images", "videos", "audios")
"""Columns in which TRL and verl keep what a prompt shows besides text."""
_TEXT_PARTS = ("text", "input_text", "output_text", None)
_PYTHON_LIST = re.compile(r"\[\s*\{\s*'")
_KNOWN_PAIRS = ({"from", "value"}, {"role", "value"}, {"speaker", "text"})


class ChatError(ValueError):
    """A prompt can't be read as it is meant; the message says what it has, and the remedy."""


@dataclass(frozen=True)
class PromptForm:
    """The system prompt and template arguments that training puts around every prompt."""

    system_prompt: str | None = None
    """System message put before every prompt."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template; those of a row come before them."""


@dataclass(frozen=True)
class Conversation:
    """A prompt as read: plain text, or messages with what their template gets besides."""

    text: str | None = None
    """Plain text, if it is no chat."""
    messages: list[Message] | None = None
    tools: list[Any] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    was_json: bool = False
    """Whether the messages were a JSON text."""

    @property
    def is_answered(self) -> bool:
        """Whether the last message is the assistant's."""
        return self.messages is not None and self.messages[-1]["role"] == "assistant"


@dataclass(frozen=True)
class EpisodePrompts:
    """The additions to the prompts of an environment's episodes."""

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools."""
    closing: str = ""
    """End of each rendered prompt that the episode's first observation gives instead."""

    def shown_in(self, conversation: Conversation) -> Conversation:
        """Return a conversation with the tools.

        Raises:
            ChatError: it can't be the beginning of an episode.
        """
        if conversation.messages is None:
            raise ChatError("is plain text, but an environment needs chat messages: write a list of role and content")
        if self.closing and conversation.messages[-1]["role"] != "user":
            raise ChatError("does not end with the user's message, to which the environment adds its own")
        if conversation.tools is not None:
            raise ChatError(f"comes with a column {TOOLS}, but the job's environment has tools; rename the column")
        return replace(conversation, tools=[dict(tool) for tool in self.tools] or None)

    def begun(self, text: str) -> str:
        """Return a rendered prompt without its closing.

        Raises:
            ChatError: it ends otherwise.
        """
        if not text.endswith(self.closing):
            raise ChatError(
                f"is rendered with {text[-60:]!r} at its end, but other prompts with {self.closing!r}; an environment"
                " needs the same arguments of the chat template for all rows"
            )
        return text[: len(text) - len(self.closing)]


def read_prompt(prompt: Any, form: PromptForm, row: Row | None = None) -> Conversation:
    """Read a prompt: text, chat messages, or the JSON text of chat messages.

    Args:
        prompt: the value of the prompt's column. Keys whose value is null count as missing, as Arrow adds them to
            messages that do not have them.
        form: what training puts around it.
        row: the row, for the columns `tools` and `chat_template_kwargs`.

    Raises:
        ChatError: it is neither, or has parts other than text.
    """
    row = row or {}
    for column in MEDIA:
        if row.get(column):
            raise ChatError(f"has {column}, but prompts are text; leave out the row, or remove the column")
    decoded = _json_messages(prompt) if isinstance(prompt, str) else None
    content = prompt if decoded is None else decoded
    if isinstance(content, str) and content and form.system_prompt is None:
        return Conversation(text=content)
    if isinstance(content, str) and content:
        content = [{"role": "user", "content": content}]
    if not (isinstance(content, list) and content and all(map(_is_message, content))):
        raise ChatError(
            "must hold text or a list of chat messages with role and content, but holds"
            f" {prompt!r:.80}{_pairs(content)}"
        )
    messages = [_message(message, number) for number, message in enumerate(content, start=1)]
    if form.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise ChatError("has a system message of its own; remove data.systemPrompt or the row's message")
        messages = [{"role": "system", "content": form.system_prompt}, *messages]
    own = _from_json(row.get(TEMPLATE_ARGUMENTS), TEMPLATE_ARGUMENTS, dict) or {}
    if reserved := _RESERVED & own.keys():
        raise ChatError(f"sets {', '.join(sorted(reserved))} in {TEMPLATE_ARGUMENTS}, which training sets itself")
    tools = _from_json(row.get(TOOLS), TOOLS, list) or None
    if tools is not None and not all(isinstance(tool, dict) for tool in tools):
        raise ChatError(
            f"has {tools!r:.80} in the column {TOOLS}, which the chat template shows as tools: give JSON schemas of"
            " functions, or rename the column"
        )
    return Conversation(
        messages=messages,
        tools=None if tools is None else without_nulls(tools),
        template_arguments={**form.template_arguments, **without_nulls(own)},
        was_json=decoded is not None,
    )


def without_nulls(value: Any) -> Any:
    """Return a value without the keys whose value is null, at any depth. Items of lists stay."""
    if isinstance(value, dict):
        return {str(name): without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(inner) for inner in value]
    return value


def render(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> str:
    """Return a prompt as the model reads it: plain text as it is, messages in the chat template.

    Raises:
        ChatError: there is no template, it refuses the messages, or the text is no Unicode text.
    """
    text = conversation.text
    if text is None:
        text = _templated(tokenizer, conversation)
    if fault := surrogate_fault(text):
        raise ChatError(fault)
    return text


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], are_plain: Sequence[bool]
) -> list[list[int]]:
    """Convert texts to token ids. Only plain text gets the tokenizer's special tokens, because a template writes its
    own."""
    tokens: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        chosen = [number for number, is_plain in enumerate(are_plain) if is_plain == special]
        if chosen:
            ids = tokenizer([texts[number] for number in chosen], add_special_tokens=special)["input_ids"]
            for number, row in zip(chosen, ids, strict=True):
                tokens[number] = list(row)
    return tokens


def unseen(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> Iterator[str]:
    """Yield the names of what a conversation has for its template, and the template does not mention."""
    template = str(tokenizer.chat_template or "")
    if conversation.tools is not None and TOOLS not in template:
        yield TOOLS
    yield from (name for name in conversation.template_arguments if name not in template)


# --- messages ----------------------------------------------------------------------------------------------------


def _json_messages(text: str) -> list[Any] | None:
    """Return the messages that a text holds as JSON; None if it is any other text."""
    if _PYTHON_LIST.match(text) and ("'role'" in text or "'content'" in text):
        raise ChatError(
            f"holds messages as Python writes a list ({text!r:.60}); write the list itself, or its JSON (json.dumps)"
        )
    if not text.lstrip().startswith("["):
        return None
    try:
        decoded = json.loads(text)
    except ValueError:
        return None
    return decoded if isinstance(decoded, list) and decoded and all(map(_is_message, decoded)) else None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _pairs(content: Any) -> str:
    first = content[0] if isinstance(content, list) and content else None
    if isinstance(first, dict) and any(pair <= first.keys() for pair in _KNOWN_PAIRS):
        return "; rename its keys to role and content, and its roles to user and assistant, with data.map"
    return ""


def _message(message: Message, number: int) -> Message:
    """Return a message whose content is one text, without null keys."""
    known = without_nulls(message)
    if "content" not in known and "tool_calls" not in known and len(known.keys() - {"role", "name"}) > 0:
        raise ChatError(f"has no content in message {number}; it has {', '.join(known)}: name its text content")
    return {**known, "content": _content(known.get("content", ""), number)}


def _content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list):
        raise ChatError(
            f"has {content!r:.60} as the content of message {number}; give text, or a list of parts with type and text"
        )
    return "".join(_part(part, number, place) for place, part in enumerate(parts, start=1))


def _part(part: Any, number: int, place: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in _TEXT_PARTS and isinstance(part.get("text", ""), str):
        return str(part.get("text", ""))
    raise ChatError(
        f"has {_article(str(kind))} in message {number}, part {place}, but prompts are text; remove the part, or leave"
        " out the row"
    )


def _article(kind: str) -> str:
    return f"an {kind}" if kind[:1] in "aeiou" else f"a {kind}"


def _from_json(value: Any, column: str, kind: type) -> Any:
    """Return a value, or what its JSON text holds: tables keep lists of tools of different forms as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise ChatError(f"has text in the column {column} that is not JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        raise ChatError(
            f"has {value!r:.60} in the column {column}, which the chat template gets: give a JSON"
            f" {'object' if kind is dict else 'list of tools'}, or rename the column"
        )
    return value


def _templated(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> str:
    if not tokenizer.chat_template:
        raise ChatError(
            "is chat data, but the model's tokenizer has no chat template; set model.chatTemplate, or write prompts as"
            " text without data.systemPrompt"
        )
    continues = conversation.is_answered
    try:
        text = tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **conversation.template_arguments,
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise ChatError(f"is refused by the chat template ({error})") from error
    return str(text)
