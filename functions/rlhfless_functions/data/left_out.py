"""Rows of a dataset that are not usable prompts, and the limit on their number."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlhfless_functions.api import DataCounts
from rlhfless_functions.data.code_tests import TestsError, read_tests
from rlhfless_functions.data.dataset_files import GROUND_TRUTH_COLUMNS, Row, Table, invalid, lookup
from rlhfless_functions.settings import RewardSettings


def is_empty(prompt: Any) -> bool:
    """Return whether a prompt is blank text, or has only empty messages. A system message counts only if it is
    alone."""
    if isinstance(prompt, str):
        return not prompt.strip()
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return False
    others = [message for message in prompt if message.get("role") != "system"]
    return not any(map(_says_something, others or prompt))


def _says_something(message: dict[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        return bool(content.strip())
    # Parts other than text, and tool calls, are content too.
    return bool(content) or bool(message.get("tool_calls")) or "content" not in message


def check_left_out(tables: Sequence[Table], counts: DataCounts, most: float) -> None:
    """Refuse a dataset if too many rows are dropped.

    Args:
        most: largest share of the rows.

    Raises:
        TaskError: data_invalid; the message has the reasons and a row for each.
    """
    if counts.left_out <= most * counts.rows:
        return
    sources = ", ".join(table.source for table in tables)
    raise invalid(
        f"{counts.left_out} of the {counts.rows} rows of {sources} were dropped, more than the share"
        f" limits.droppedPrompts ({most:g}): {counts.reasons}. {counts.remedies}, or raise limits.droppedPrompts"
    )


TruthCheck = Callable[[str, Sequence[Any]], list[tuple[int, str]]]
"""Takes a reward's kind and ground truths. Returns the positions of those that it can't read, and what each is."""
_SHOWN = 5
"""Rows that an error names."""


def check_what_rewards_need(
    table: Table,
    numbers: Sequence[int],
    rewards: Iterable[RewardSettings],
    truth: str | None,
    unreadable: TruthCheck | None = None,
) -> None:
    """Refuse rows that a reward can't score, unless it may leave samples unscored.

    Args:
        numbers: the rows that are usable prompts.
        truth: column of the ground truth, if there is one.
        unreadable: finds the ground truths that a reward can't read; they are not read if None.

    Raises:
        TaskError: data_invalid; the message names the first such rows.
    """
    for reward in rewards:
        if reward.on_error == "unscorable":
            continue
        whose = f"reward {reward.name!r} ({reward.kind.replace('exact_match', 'exactMatch')})"
        if reward.kind in ("math", "exact_match"):
            if truth is None:
                raise invalid(
                    f"{table.source} has no ground truth (no column {', '.join(GROUND_TRUTH_COLUMNS)}), which {whose}"
                    f" needs; it has {', '.join(table.columns)}: set data.groundTruthColumn to one of them"
                )
            _check_column(table, numbers, truth, f"no ground truth in column {truth!r}", whose)
            if unreadable is not None:
                _check_truths(table, numbers, truth, unreadable(reward.kind, _values(table, numbers, truth)), whose)
        elif reward.code is not None:
            _check_tests(table, numbers, reward.code.tests_column, whose)


def _check_column(table: Table, numbers: Sequence[int], column: str, lack: str, whose: str) -> None:
    lacking = [number for number in numbers if lookup(table.rows[number], column) is None]
    if lacking:
        raise invalid(
            f"{table.place(lacking[0])} has {lack}, which {whose} needs; it has {_columns(table.rows[lacking[0]])}"
            f" ({len(lacking)} of {len(numbers)} rows lack it); add the missing values, remove the rows, or set the"
            " reward's onError to unscorable"
        )


def _check_tests(table: Table, numbers: Sequence[int], column: str | None, whose: str) -> None:
    faults: dict[int, str] = {}
    for number in numbers:
        try:
            read_tests(table.rows[number], column)
        except TestsError as error:
            faults[number] = str(error)
    if faults:
        first, fault = next(iter(faults.items()))
        raise invalid(
            f"{table.place(first)} has no tests that {whose} can use: {fault} (the row has"
            f" {_columns(table.rows[first])}; {len(faults)} of {len(numbers)} rows have none); correct or remove these"
            " rows, or set the reward's onError to unscorable"
        )


def _values(table: Table, numbers: Sequence[int], column: str) -> list[Any]:
    return [lookup(table.rows[number], column) for number in numbers]


def _check_truths(
    table: Table, numbers: Sequence[int], column: str, faults: Sequence[tuple[int, str]], whose: str
) -> None:
    if not faults:
        return
    shown = []
    for position, fault in faults[:_SHOWN]:
        number = numbers[position]
        shown.append(f"{table.where(number)}: {lookup(table.rows[number], column)!r:.80} {fault}")
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise invalid(
        f"{table.source} has {len(faults)} ground truths in column {column!r} that {whose} can't read"
        f" ({'; '.join(shown)}{more}); correct or remove these rows, or set the reward's onError to unscorable"
    )


def _columns(row: Row) -> str:
    return ", ".join(name for name, value in row.items() if value is not None) or "no columns"
