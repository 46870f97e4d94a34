"""The rows of a dataset: which kind of file holds them, JSON lines, and the columns that mean something.

Light: the control plane looks at them, too.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

PROMPT_COLUMNS = ("prompt", "messages", "question")
"""Columns that are taken for the prompt, the first of them that there is."""
GROUND_TRUTH_COLUMNS = (
    "ground_truth",
    "answer",
    "solution",
    "label",
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
)
"""Columns that are taken for the ground truth; a dot leads into a nested one."""

Row = dict[str, Any]


def lookup(row: Row, column: str) -> Any:
    """A column's value; a dot leads into nested ones. None where there is none."""
    if column in row:
        return row[column]
    outer, _, inner = column.partition(".")
    nested = row.get(outer)
    return lookup(nested, inner) if inner and isinstance(nested, dict) else None


def kind_of_file(name: str) -> Literal["jsonl", "parquet"] | None:
    """What a path or URI names, compressed or not; None where its ending does not tell."""
    name = name.lower()
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        name = name.removesuffix(suffix)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    return "parquet" if name.endswith((".parquet", ".pq")) else None


class JsonLineError(ValueError):
    """A line of a file is no JSON object.

    Args:
        number: of the line, from 1.
        fault: what the line is instead.
        remedy: what to do about it.
    """

    def __init__(self, number: int, fault: str, remedy: str) -> None:
        super().__init__(f"line {number} {fault}; {remedy}")
        self.number, self.fault, self.remedy = number, fault, remedy


def json_rows(lines: Iterable[bytes]) -> Iterator[tuple[int, Row]]:
    """The rows of JSON lines, with the numbers of their lines, from 1. Empty lines are passed over.

    Raises:
        JsonLineError: for the first line that is no JSON object.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise JsonLineError(number, f"is no JSON ({error})", "write one JSON object a line") from error
        if not isinstance(row, dict):
            fault = f"holds no JSON object but {type(row).__name__}"
            raise JsonLineError(number, fault, "write one object a line")
        yield number, row
