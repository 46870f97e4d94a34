"""Convert datasets of prompts to token ids, and publish them once for all functions.

A prompt is text, which the model reads unchanged, or chat messages, to which the chat template is applied. All other
columns are kept for the rewards.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from rlhfless_functions.api import DataCounts
from rlhfless_functions.data.dataset_files import Table, ground_truth_column, invalid, prompt_column
from rlhfless_functions.data.left_out import check_what_rewards_need, is_empty
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.data.rows import Row, lookup
from rlhfless_functions.settings import DataSettings, RewardSettings, SamplingSettings

_log = logging.getLogger(__name__)


def make_prompts(
    table: Table,
    data: DataSettings,
    sampling: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None = None,
    rewards: Sequence[RewardSettings] = (),
) -> tuple[list[Prompt], DataCounts]:
    """Apply the chat template, tokenize, and drop prompts that are empty, answered or too long.

    Args:
        table: the dataset.
        data: how to read it.
        sampling: the longest prompt and response.
        tokenizer: with the job's chat template.
        positions: most tokens that the model can read, prompt and response together.
        rewards: rewards whose columns each row must have.

    Returns:
        The prompts, in the dataset's order and numbered from 0, and the counts of all rows.

    Raises:
        TaskError: data_invalid; the message names the row and the remedy.
    """
    column, truth = prompt_column(table, data), ground_truth_column(table, data)
    left_out: dict[int, str] = {}
    conversations: dict[int, list[dict[str, Any]] | None] = {}
    for number, row in enumerate(table.rows):
        if is_empty(lookup(row, column)):
            left_out[number] = "empty"
            continue
        conversations[number] = messages = _messages(table, number, column, data.system_prompt)
        if messages is not None and messages[-1]["role"] == "assistant" and data.answered_prompts != "continue":
            left_out[number] = "answered"
    _refuse_answered(table, left_out, data)
    numbers = [number for number in conversations if number not in left_out]
    texts = {
        number: lookup(table.rows[number], column)
        if (messages := conversations[number]) is None
        else _templated(tokenizer, messages, table, number)
        for number in numbers
    }
    ids = _tokenize(tokenizer, list(texts.values()), [conversations[number] is None for number in numbers])
    tokens = dict(zip(numbers, ids, strict=True))
    kept = _fitting(table, tokens, data, sampling, positions, left_out)
    check_what_rewards_need(table, kept, rewards, truth)
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
        _log.warning("columns %s have values that JSON can't hold; rewards don't get them", ", ".join(sorted(unusable)))
    return prompts, _counts(table, left_out, kept, truth)


def _refuse_answered(table: Table, left_out: Mapping[int, str], data: DataSettings) -> None:
    answered = [number for number, reason in left_out.items() if reason == "answered"]
    if answered and data.answered_prompts == "fail":
        raise invalid(
            f"{table.place(answered[0])} ends with the assistant's message, as do {len(answered)} of {len(table.rows)}"
            " rows; remove the answers from the prompts, or set data.answeredPrompts to continue or drop"
        )


def _counts(table: Table, left_out: Mapping[int, str], kept: Sequence[int], truth: str | None) -> DataCounts:
    reasons = dict(left_out)
    if truth is not None:
        reasons |= {number: "without_ground_truth" for number in kept if lookup(table.rows[number], truth) is None}
    first = {reason: table.where(number) for number, reason in sorted(reasons.items(), reverse=True)}
    return DataCounts(rows=len(table.rows), first=first, **Counter(reasons.values()))


def _messages(table: Table, number: int, column: str, system_prompt: str | None) -> list[dict[str, Any]] | None:
    """Return a prompt as chat messages; None if it is plain text."""
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
            f"{table.place(number)} is chat data, but the model's tokenizer has no chat template; set"
            " model.chatTemplate, or write prompts as text without data.systemPrompt"
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
    """Convert texts to token ids. Only plain text gets the tokenizer's special tokens, because a template writes its
    own."""
    tokens: list[list[int]] = [[] for _ in texts]
    for special in (True, False):
        chosen = [number for number, is_plain in enumerate(plain) if is_plain == special]
        if chosen:
            ids = tokenizer([texts[number] for number in chosen], add_special_tokens=special)["input_ids"]
            for number, row in zip(chosen, ids, strict=True):
                tokens[number] = list(row)
    return tokens


def _fitting(
    table: Table,
    tokens: Mapping[int, Sequence[int]],
    data: DataSettings,
    sampling: SamplingSettings,
    positions: int | None,
    left_out: dict[int, str],
) -> list[int]:
    """Return the numbers of the rows whose prompts are neither empty nor too long; the others go to `left_out`."""
    longest = sampling.max_prompt_tokens
    long = [number for number, ids in tokens.items() if len(ids) > longest]
    if long and data.long_prompts == "fail":
        raise invalid(
            f"{table.place(long[0])} has a prompt of {len(tokens[long[0]])} tokens, and {len(long)} of"
            f" {len(table.rows)} prompts have more than sampling.maxPromptTokens ({longest}); raise it, or set"
            " data.longPrompts to drop"
        )
    left_out |= dict.fromkeys(long, "too_long")
    left_out |= {number: "empty" for number, ids in tokens.items() if not ids}
    kept = [number for number in tokens if number not in left_out]
    if not kept and len(long) == len(table.rows):
        raise invalid(
            f"every prompt of {table.source} is longer than sampling.maxPromptTokens ({longest}; the shortest has"
            f" {min(map(len, tokens.values()))} tokens); raise it, or shorten the prompts"
        )
    if not kept:
        counts = _counts(table, left_out, [], None)
        raise invalid(f"no row of {table.source} is a usable prompt: {counts.reasons}. {counts.remedies}")
    for number in kept:
        if positions is not None and len(tokens[number]) + sampling.max_response_tokens > positions:
            raise invalid(
                f"{table.place(number)} has a prompt of {len(tokens[number])} tokens, which together with"
                f" sampling.maxResponseTokens ({sampling.max_response_tokens}) is more than the model's {positions}"
                " positions; lower sampling.maxPromptTokens or sampling.maxResponseTokens"
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
    """Convert a value to JSON.

    Raises:
        TypeError: JSON can't hold the value, such as an image's bytes.
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
    raise TypeError(f"a {type(value).__name__} is not a JSON value")
