"""Rows of a dataset that are not usable prompts, and the limit on their number."""

from collections.abc import Iterable, Sequence
from typing import Any

from rlhfless_functions.api import DataCounts
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


def check_left_out(table: Table, counts: DataCounts, most: float) -> None:
    """Refuse a dataset if too many rows are dropped.

    Args:
        most: largest share of the rows.

    Raises:
        TaskError: data_invalid; the message has the reasons and a row for each.
    """
    if counts.left_out <= most * counts.rows:
        return
    raise invalid(
        f"{counts.left_out} of the {counts.rows} rows of {table.source} were dropped, more than the share"
        f" limits.droppedPrompts ({most:g}): {counts.reasons}. {counts.remedies}, or raise limits.droppedPrompts"
    )


def check_what_rewards_need(
    table: Table, numbers: Sequence[int], rewards: Iterable[RewardSettings], truth: str | None
) -> None:
    """Refuse rows that a reward can't score, unless it may leave samples unscored.

    Args:
        numbers: the rows that are usable prompts.
        truth: column of the ground truth, if there is one.

    Raises:
        TaskError: data_invalid; the message names the first such row and the existing columns.
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
        elif reward.code is not None:
            column = reward.code.tests_column
            _check_column(table, numbers, column, f"no tests in column {column!r} (code.testsColumn)", whose)


def _check_column(table: Table, numbers: Sequence[int], column: str, lack: str, whose: str) -> None:
    lacking = [number for number in numbers if lookup(table.rows[number], column) is None]
    if lacking:
        raise invalid(
            f"{table.place(lacking[0])} has {lack}, which {whose} needs; it has {_columns(table.rows[lacking[0]])}"
            f" ({len(lacking)} of {len(numbers)} rows lack it); add the missing values, remove the rows, or set the"
            " reward's onError to unscorable"
        )


def _columns(row: Row) -> str:
    return ", ".join(name for name, value in row.items() if value is not None) or "no columns"
