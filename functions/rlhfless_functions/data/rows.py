"""The rows of a dataset: the kind of its file, JSON lines, and the columns with a meaning.

This module is light, because the control plane imports it too.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
"""Names of the prompt's column; the first that exists counts."""
GROUND_TRUTH_COLUMNS = (
    "ground_truth",
    "expected_answer",
    "final_answer",
    "reference_answer",
    "correct_answer",
    "gt_answer",
    "answer",
    "solution",
    "label",
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
)
"""Names of the ground truth's column; the first that exists counts. A name that says more comes before `answer`, which
may be a model's beside it. A dot separates a nested column from its parent."""

Row = dict[str, Any]

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def lookup(row: Row, column: str) -> Any:
    """Return a column's value; a dot separates nested columns. None if there is none."""
    if column in row:
        return row[column]
    outer, _, inner = column.partition(".")
    nested = row.get(outer)
    return lookup(nested, inner) if inner and isinstance(nested, dict) else None


def surrogate_fault(value: Any) -> str | None:
    """Describe half of a surrogate pair in a text, or anywhere in a value; None if there is none.

    JSON can hold one (`\\ud83d`), for example of an emoji that was cut in two. No tokenizer reads it.
    """
    if isinstance(value, str):
        found = _SURROGATE.search(value)
        if found is None:
            return None
        return (
            f"has half of a surrogate pair (\\u{ord(found[0]):04x} at character {found.start() + 1}), which is no"
            " Unicode text: an emoji was cut in two; repair the text, or leave out the row"
        )
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((fault for each in inner if (fault := surrogate_fault(each))), None)


def kind_of_file(name: str) -> Literal["jsonl", "parquet", "csv", "tsv", "arrow"] | None:
    """Return the kind of file that a path or URI names, compressed or not; None if its ending does not tell."""
    name = name.lower()
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        name = name.removesuffix(suffix)
    endings: dict[str, Literal["jsonl", "parquet", "csv", "tsv", "arrow"]] = {
        **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
        **dict.fromkeys((".parquet", ".pq"), "parquet"),
        **{".csv": "csv", ".tsv": "tsv"},
        **dict.fromkeys((".arrow", ".feather"), "arrow"),
    }
    return next((kind for ending, kind in endings.items() if name.endswith(ending)), None)


class JsonLineError(ValueError):
    """A line of a file is not a JSON object.

    Args:
        number: number of the line, from 1.
        fault: description of the line.
        remedy: the remedy.
    """

    def __init__(self, number: int, fault: str, remedy: str) -> None:
        super().__init__(f"line {number} {fault}; {remedy}")
        self.number, self.fault, self.remedy = number, fault, remedy


def json_rows(lines: Iterable[bytes]) -> Iterator[tuple[int, Row]]:
    """Yield the rows of JSON lines, with their line numbers, from 1. Empty lines are skipped.

    Raises:
        JsonLineError: a line is not a JSON object.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise JsonLineError(number, f"is not JSON ({error})", "write one JSON object per line") from error
        if not isinstance(row, dict):
            fault = f"holds {type(row).__name__}, not a JSON object"
            raise JsonLineError(number, fault, "write one object per line")
        yield number, row
