"""Prompts of a materialised dataset, as a Parquet file for plain pyarrow and pandas. Without torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from rlhfless_functions import artifacts
from rlhfless_functions.api import DataCounts
from rlhfless_functions.data.parquet import array, read_table, write_table
from rlhfless_functions.data.prefix_tree import prefix_tree

PROMPTS = "prompts.parquet"
"""Name of the prompts' file in the folder of a materialised dataset."""

PROMPT_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("messages", pa.string()),
        pa.field("ground_truth", pa.string()),
        pa.field("columns", pa.string(), nullable=False),
    ]
)
"""Columns of the prompts. Values of any form (messages, ground truth, the dataset's own columns) are JSON."""
_JSON = ("messages", "ground_truth", "columns")


@dataclass
class Prompt:
    """One row of a materialised dataset."""

    row: int
    tokens: list[int]
    """The prompt as the model reads it, chat template included."""
    text: str
    """The prompt as text."""
    messages: list[dict[str, Any]] | None = None
    """The chat messages, if the dataset has them."""
    ground_truth: Any = None
    """The `ground_truth` that rewards get."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The dataset's columns, which rewards get by their names."""


def write_prompts(uri: str, prompts: Sequence[Prompt]) -> None:
    """Write a dataset's prompts, row 0 first, as one Parquet file, atomically.

    Raises:
        ValueError: the rows are not 0, 1, 2, ….
        TypeError: messages, ground truth or columns have values that JSON can't hold.
        ArtifactUnwritableError: the file can't be written.
    """
    if [prompt.row for prompt in prompts] != list(range(len(prompts))):
        raise ValueError("prompts must be written in the order of their rows, from 0, none left out")
    columns = {name: [getattr(prompt, name) for prompt in prompts] for name in PROMPT_SCHEMA.names}
    for name in _JSON:
        columns[name] = [None if value is None else json.dumps(value) for value in columns[name]]
    write_table(uri, columns, PROMPT_SCHEMA)


def publish_prompts(uri: str, prompts: Sequence[Prompt], counts: DataCounts) -> None:
    """Publish a materialised dataset: `prompts.parquet` for the functions, `index.json` for the control plane.

    The index holds `prompts` and `dropped` (how many), `counts` (why), `lengths` (tokens of each prompt), and
    `prefixes`: the shared prefixes (`prefix_tree`), null if there are none.

    Raises:
        ArtifactUnwritableError: it can't be written; nothing is published.
    """
    tokens = [prompt.tokens for prompt in prompts]
    lengths = [len(each) for each in tokens]
    index = {
        "prompts": len(prompts),
        "dropped": counts.left_out,
        "counts": counts.model_dump(),
        "lengths": lengths,
        "prefixes": prefix_tree(tokens),
    }
    with artifacts.publish(uri) as folder:
        write_prompts(str(folder / PROMPTS), prompts)
        artifacts.write_json(str(folder / "index.json"), index)


def read_prompts(uri: str, rows: Iterable[int] | None = None) -> list[Prompt]:
    """Read prompts.

    Args:
        uri: the Parquet file, or the materialised dataset's folder.
        rows: the rows to read, in this order; by default all.

    Raises:
        ArtifactMissingError: the file can't be read.
        ArtifactCorruptError: it is not a file of prompts.
        IndexError: the dataset does not have a row.
    """
    if not uri.endswith(".parquet"):
        uri = artifacts.join(uri, PROMPTS)
    table = read_table(uri, PROMPT_SCHEMA)
    if rows is not None:
        chosen = list(rows)
        for row in chosen:
            if not 0 <= row < table.num_rows:
                raise IndexError(f"{uri} has rows 0 to {table.num_rows - 1}, not {row}")
        table = table.take(array(chosen, pa.int64()))
    records = table.to_pylist()
    for record in records:
        record |= {name: json.loads(record[name]) for name in _JSON if record[name] is not None}
    return [Prompt(**record) for record in records]
