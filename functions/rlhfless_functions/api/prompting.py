"""The surroundings of prompts in training, as a published model names them."""

from typing import Any

from pydantic import Field

from rlhfless_functions.api.messages import Message

PROMPTING = "prompting.json"
"""File of a published model with its `Prompting`."""


class Prompting(Message):
    """The surroundings of a prompt in training, and the strings that ended responses."""

    chat: bool = True
    """Whether prompts were chat messages, in the template of the tokenizer; otherwise they were plain text."""
    system_prompt: str | None = None
    """System message before every prompt."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the chat template."""
    stop: list[str] = Field(default=[])
    """Strings that ended a response."""
