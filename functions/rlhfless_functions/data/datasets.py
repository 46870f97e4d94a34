"""Datasets of prompts: made into token ids, and published once for all functions.

A prompt is text, which the model reads as it is, or chat messages, which go through the chat template; where the last
message is the assistant's own, the model continues it. Every other column is kept for the rewards.
"""

import logging
from datetime import date, time
from decimal import Decimal
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhfless_functions.data.dataset_files import Row, Table, ground_truth_column, invalid, lookup, prompt_column
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.settings import DataSettings, SamplingSettings

_log = logging.getLogger(__name__)


def make_prompts(
    table: Table,
    data: DataSettings,
    sampling: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None = None,
) -> tuple[list[Prompt], int]:
    """Apply the chat template, tokenize, and leave out what is too long.

    Args:
        table: the dataset.
        data: how to read it.
        sampling: the longest prompt and response.
        tokenizer: with the job's chat template.
        positions: tokens that the model can read at most, prompt and response together.

    Returns:
        The prompts, in the dataset's order and numbered from 0, and how many were dropped.

    Raises:
        TaskError: data_invalid, naming row and remedy.
    """
    column, truth = prompt_column(table, data), ground_truth_column(table, data)
    conversations = [_messages(table, number, column, data.system_prompt) for number in range(len(table.rows))]
    texts = [
        lookup(table.rows[number], column) if messages is None else _templated(tokenizer, messages, table, number)
        for number, messages in enumerate(conversations)
    ]
    tokens = _tokenize(tokenizer, texts, [messages is None for messages in conversations])
    kept = _fitting(table, tokens, data, sampling, positions)
    unusable: set[str] = set()
    prompts = [
        Prompt(
            row=row,
            tokens=tokens[number],
            text=texts[number],
            messages=conversations[number],
            ground_truth=None if truth is None else _json(lookup(table.rows[number], truth), truth, table, number),
            columns=_columns(table.rows[number], column, unusable),
        )
        for row, number in enumerate(kept)
    ]
    if unusable:
        _log.warning("columns %s hold what JSON cannot, and are not handed to rewards", ", ".join(sorted(unusable)))
    return prompts, len(tokens) - len(kept)


def _messages(table: Table, number: int, column: str, system_prompt: str | None) -> list[dict[str, Any]] | None:
    """A prompt as chat messages; None if it is plain text."""
    prompt = lookup(table.rows[number], column)
    if isinstance(prompt, str) and prompt:
        if system_prompt is None:
            return None
        prompt = [{"role": "user", "content": prompt}]
    if not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
        raise invalid(
            f"{table.place(number)}: column {column!r} must hold text or a list of chat messages with role and"
            f" content, but holds {prompt!r:.80}"
        )
    messages: list[dict[str, Any]] = _json(prompt, column, table, number)
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise invalid(
            f"{table.place(number)} has a system message of its own; remove data.systemPrompt or the row's message"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _templated(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], table: Table, number: int) -> str:
    if not tokenizer.chat_template:
        raise invalid(
            f"{table.place(number)} is chat data, but the model's tokenizer has no chat template: set"
            " model.chatTemplate, or give prompts as text without data.systemPrompt"
        )
    continues = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise invalid(f"{table.place(number)}: the chat template refuses the messages ({error})") from error
    return str(text)


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], plain: list[bool]) -> list[list[int]]:
    """Token ids; only plain text gets the tokenizer's special tokens, since a template writes its own."""
    tokens: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        chosen = [number for number, is_plain in enumerate(plain) if is_plain == special]
        if chosen:
            ids = tokenizer([texts[number] for number in chosen], add_special_tokens=special)["input_ids"]
            for number, row in zip(chosen, ids, strict=True):
                tokens[number] = list(row)
    return tokens


def _fitting(
    table: Table, tokens: list[list[int]], data: DataSettings, sampling: SamplingSettings, positions: int | None
) -> list[int]:
    """Numbers of the rows whose prompts are short enough."""
    longest = sampling.max_prompt_tokens
    kept = [number for number, ids in enumerate(tokens) if len(ids) <= longest]
    if len(kept) < len(tokens) and data.long_prompts == "fail":
        number = next(number for number, ids in enumerate(tokens) if len(ids) > longest)
        raise invalid(
            f"{table.place(number)} has a prompt of {len(tokens[number])} tokens, and {len(tokens) - len(kept)} of"
            f" {len(tokens)} prompts have more than sampling.maxPromptTokens, {longest}: raise it, or set"
            " data.longPrompts to drop"
        )
    if not kept:
        raise invalid(
            f"every prompt of {table.source} is longer than sampling.maxPromptTokens, {longest} (the shortest has"
            f" {min(map(len, tokens))} tokens): raise it, or shorten the prompts"
        )
    for number in kept:
        if not tokens[number]:
            raise invalid(f"{table.place(number)} has a prompt of no tokens: remove the row, or give it a prompt")
        if positions is not None and len(tokens[number]) + sampling.max_response_tokens > positions:
            raise invalid(
                f"{table.place(number)} has a prompt of {len(tokens[number])} tokens, which with"
                f" sampling.maxResponseTokens, {sampling.max_response_tokens}, is more than the model's {positions}"
                " positions: lower sampling.maxPromptTokens or sampling.maxResponseTokens"
            )
    return kept


def _columns(row: Row, prompt: str, unusable: set[str]) -> Row:
    columns = {}
    for name, value in row.items():
        if name != prompt:
            try:
                columns[name] = _plain(value)
            except TypeError:
                unusable.add(name)
    return columns


def _json(value: Any, column: str, table: Table, number: int) -> Any:
    try:
        return _plain(value)
    except TypeError as error:
        raise invalid(f"{table.place(number)}: column {column!r} cannot be used: {error}; give text") from error


def _plain(value: Any) -> Any:
    """A value as JSON has it.

    Raises:
        TypeError: for what JSON cannot hold, such as an image's bytes.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__} is no JSON value")
