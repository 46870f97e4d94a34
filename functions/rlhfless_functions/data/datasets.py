"""Convert datasets of prompts to token ids, and publish them once for all functions.

A prompt is text, which the model reads unchanged, or chat messages, to which the chat template is applied. All other
columns are kept for the rewards.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, time
from decimal import Decimal
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhfless_functions.api import DataCounts
from rlhfless_functions.data.chats import (
    MEDIA,
    TEMPLATE_ARGUMENTS,
    TOOLS,
    ChatError,
    Conversation,
    EpisodePrompts,
    PromptForm,
    prompt_tokens,
    read_prompt,
    render,
    unseen,
)
from rlhfless_functions.data.dataset_files import (
    Table,
    choices_of_columns,
    ground_truth_column,
    invalid,
    prompt_column,
)
from rlhfless_functions.data.left_out import TruthCheck, check_what_rewards_need, is_empty
from rlhfless_functions.data.lost_characters import lost_characters
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.data.rows import Row, lookup, surrogate_fault
from rlhfless_functions.data.thoughts import begun_thoughts
from rlhfless_functions.settings import DataSettings, RewardSettings, SamplingSettings

_log = logging.getLogger(__name__)


def make_prompts(
    tables: Sequence[Table],
    data: DataSettings,
    sampling: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None = None,
    rewards: Sequence[RewardSettings] = (),
    unreadable: TruthCheck | None = None,
    episodes: EpisodePrompts | None = None,
) -> tuple[list[Prompt], DataCounts]:
    """Apply the chat template, tokenize, and drop prompts that are empty, answered or too long.

    Args:
        tables: the sources of the dataset.
        data: which prompts to drop.
        sampling: the longest prompt and response.
        tokenizer: with the job's chat template.
        positions: most tokens that the model can read, prompt and response together.
        rewards: rewards whose columns each row must have.
        unreadable: finds the ground truths that these can't read; see `check_what_rewards_need`.
        episodes: what the prompts of an environment's episodes have; None if the job has no environment.

    Returns:
        The prompts, one source after the other in its order and numbered from 0, and the counts of all rows.

    Raises:
        TaskError: data_invalid; the message names the row and the remedy.
    """
    made = [_prompts_of(table, data, sampling, tokenizer, positions, rewards, unreadable, episodes) for table in tables]
    prompts = [prompt for each, _ in made for prompt in each]
    if len(made) > 1:
        prompts = [replace(prompt, row=row) for row, prompt in enumerate(prompts)]
    return prompts, _together(tables, [counts for _, counts in made])


def _together(tables: Sequence[Table], counts: Sequence[DataCounts]) -> DataCounts:
    """Return the counts of several sources as those of one dataset."""
    if len(counts) == 1:
        return counts[0]
    numbers = ("rows", "too_long", "empty", "answered", "without_ground_truth", "chats", "filtered")
    first: dict[str, str] = {}
    for table, each in zip(tables, counts, strict=True):
        first = {name: f"{place} of {table.source}" for name, place in each.first.items()} | first
    return DataCounts(
        first=first,
        notes=[f"{table.source}: {note}" for table, each in zip(tables, counts, strict=True) for note in each.notes],
        sizes=[size for each in counts for size in each.sizes],
        **{name: sum(getattr(each, name) for each in counts) for name in numbers},
    )


def _prompts_of(
    table: Table,
    data: DataSettings,
    sampling: SamplingSettings,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
    rewards: Sequence[RewardSettings],
    unreadable: TruthCheck | None,
    episodes: EpisodePrompts | None,
) -> tuple[list[Prompt], DataCounts]:
    continued = data.answered_prompts == "continue"
    column, truth = prompt_column(table, continued=continued), ground_truth_column(table)
    left_out: dict[int, str] = {}
    conversations: dict[int, Conversation] = {}
    form = PromptForm(table.reading.system_prompt, table.reading.chat_template_kwargs)
    for number, row in enumerate(table.rows):
        if is_empty(lookup(row, column)):
            left_out[number] = "empty"
            continue
        with _placed(table, number, column):
            conversation = read_prompt(_plain(lookup(row, column)), form, _template_columns(row))
            conversations[number] = conversation if episodes is None else episodes.shown_in(conversation)
        if conversations[number].is_answered and data.answered_prompts != "continue":
            left_out[number] = "answered"
    _refuse_answered(table, left_out, data)
    numbers = [number for number in conversations if number not in left_out]
    texts = {}
    for number in numbers:
        with _placed(table, number, column):
            text = render(tokenizer, conversations[number])
            texts[number] = text if episodes is None else episodes.begun(text)
    are_plain = [conversations[number].messages is None for number in numbers]
    tokens = dict(zip(numbers, prompt_tokens(tokenizer, list(texts.values()), are_plain), strict=True))
    kept = _fitting(table, tokens, data, sampling, positions, left_out)
    check_what_rewards_need(table, kept, rewards, truth, unreadable)
    unusable: set[str] = set()
    prompts = [
        Prompt(
            row=row,
            tokens=tokens[number],
            text=texts[number],
            messages=conversations[number].messages,
            ground_truth=None if truth is None else _truth(table, number, truth),
            columns=_columns(table.rows[number], column, conversations[number].messages, unusable),
        )
        for row, number in enumerate(kept)
    ]
    if unusable:
        _log.warning("columns %s have values that JSON can't hold; rewards don't get them", ", ".join(sorted(unusable)))
    counts = _counts(table, left_out, kept, truth)
    notes = list(choices_of_columns(table, continued=continued))
    notes += _notes(table, tokenizer, {number: conversations[number] for number in kept}, texts, rewards)
    plain = [number for number in kept if conversations[number].messages is None]
    notes += _marked(table, tokenizer, {number: tokens[number] for number in plain})
    notes += lost_characters(table, tokenizer, {number: texts[number] for number in kept})
    chats = sum(prompt.messages is not None for prompt in prompts)
    return prompts, counts.model_copy(
        update={"notes": notes, "chats": chats, "filtered": table.filtered, "sizes": [len(prompts)]}
    )


def _template_columns(row: Row) -> Row:
    return {name: row[name] for name in (*MEDIA, TOOLS, TEMPLATE_ARGUMENTS) if row.get(name) is not None}


@contextmanager
def _placed(table: Table, number: int, column: str) -> Iterator[None]:
    """Raise the fault of a prompt as one of the dataset, with its row and column."""
    try:
        yield
    except ChatError as error:
        raise invalid(f"{table.place(number)}: column {column!r} {error}") from error
    except TypeError as error:
        raise invalid(f"{table.place(number)}: column {column!r} cannot be used: {error}; give text") from error


def _truth(table: Table, number: int, column: str) -> Any:
    with _placed(table, number, column):
        value = _plain(lookup(table.rows[number], column))
        if fault := surrogate_fault(value):
            raise ChatError(fault)
        return value


def _notes(
    table: Table,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Mapping[int, Conversation],
    texts: Mapping[int, str],
    rewards: Sequence[RewardSettings],
) -> Iterator[str]:
    """Yield remarks for people on how the prompts were read."""
    if table.filtered:
        yield f"data.filter left out {table.filtered} of {table.filtered + len(table.rows)} rows"
    as_json = [number for number, each in conversations.items() if each.was_json]
    if as_json:
        yield (
            f"{len(as_json)} prompts are JSON texts of chat messages (first {table.where(as_json[0])});"
            " they were read as messages"
        )
    not_shown: dict[str, int] = {}
    for number, each in conversations.items():
        columns = [name for name in (TOOLS, TEMPLATE_ARGUMENTS) if table.rows[number].get(name)]
        for name in unseen(tokenizer, each) if each.messages is not None else columns:
            not_shown.setdefault(name, number)
    for name, number in not_shown.items():
        why = "the chat template does not mention it" if conversations[number].messages else "the prompt is plain text"
        yield f"{name} has no effect on prompts (first {table.where(number)}): {why}"
    begun = [number for number in conversations if begun_thoughts(texts[number])]
    if begun:
        own = ", ".join(reward.name for reward in rewards if reward.kind in ("python", "http"))
        yield (
            f"{len(begun)} prompts end with {begun_thoughts(texts[begun[0]]).strip()}, so responses begin within the"
            " thoughts; format rewards put it before the response"
            + (f", but functions of your own ({own}) get the response without it, as in TRL" if own else "")
        )


def _marked(table: Table, tokenizer: PreTrainedTokenizerBase, plain: Mapping[int, Sequence[int]]) -> Iterator[str]:
    """Yield remarks on plain prompts that the tokenizer's own special tokens spoil."""
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    ended = [number for number, ids in plain.items() if end is not None and ids[-1] == end]
    if ended:
        yield (
            f"{len(ended)} prompts end in {tokenizer.eos_token} (first {table.where(ended[0])}), so the model answers"
            " after the end of a text. If the tokenizer adds it to plain text, write prompts as chat messages or give"
            " model.tokenizer one that does not"
        )
    twice = [number for number, ids in plain.items() if begin is not None and list(ids[:2]) == [begin, begin]]
    if twice:
        yield (
            f"{len(twice)} prompts begin with two {tokenizer.bos_token} (first {table.where(twice[0])}): the tokenizer"
            " adds one to plain text; remove the text's own"
        )


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
        choices = choices_of_columns(table, continued=data.answered_prompts == "continue")
        hints = "".join(f". {each[0].upper()}{each[1:]}" for each in choices)
        raise invalid(f"no row of {table.source} is a usable prompt: {counts.reasons}. {counts.remedies}{hints}")
    for number in kept:
        if positions is not None and len(tokens[number]) + sampling.max_response_tokens > positions:
            raise invalid(
                f"{table.place(number)} has a prompt of {len(tokens[number])} tokens, which together with"
                f" sampling.maxResponseTokens ({sampling.max_response_tokens}) is more than the model's {positions}"
                " positions; lower sampling.maxPromptTokens or sampling.maxResponseTokens"
            )
    return kept


def _columns(row: Row, prompt: str, messages: list[dict[str, Any]] | None, unusable: set[str]) -> Row:
    """Return a row's columns, the prompt's too: a reward may ask for `question`. A chat is as the model saw it."""
    columns = {}
    for name, value in row.items():
        try:
            columns[name] = messages if name == prompt and not isinstance(value, str) else _plain(value)
        except TypeError:
            unusable.add(name)
    return columns


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
