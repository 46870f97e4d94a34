"""Read dataset files (JSONL, Parquet and saved `datasets` folders) as rows, and find the columns with a meaning."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pyarrow as pa
from fsspec.compression import compr
from fsspec.utils import infer_compression

from rlhfless_functions import artifacts
from rlhfless_functions.data.parquet import table_of
from rlhfless_functions.data.rows import (
    GROUND_TRUTH_COLUMNS,
    PROMPT_COLUMNS,
    JsonLineError,
    Row,
    json_rows,
    kind_of_file,
    lookup,
)
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import DataSettings


@dataclass(frozen=True)
class Table:
    """The rows of a dataset as read."""

    source: str
    rows: list[Row]
    lines: list[int] | None = None
    """Line of each row in its file, if it has one."""

    def place(self, number: int) -> str:
        """Return the place of a row, for a message."""
        return f"{self.source}, {self.where(number)}"

    def where(self, number: int) -> str:
        """Return the place of a row in the dataset."""
        return f"row {number}" if self.lines is None else f"line {self.lines[number]}"

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


# --- reading -----------------------------------------------------------------------------------------------------


def read_table(data: DataSettings) -> Table:
    """Read a dataset.

    Raises:
        TaskError: data_invalid, or artifact_missing if it does not exist; the message names the line or row.
    """
    readers: dict[str, Callable[[str], Table]] = {
        "jsonl": _read_jsonl,
        "parquet": _read_parquet,
        "datasets": _read_datasets,
    }
    try:
        table = readers[_format(data) if data.format == "auto" else data.format](data.source)
    except artifacts.ArtifactMissingError as error:
        raise TaskError("artifact_missing", f"data.source: {error}", retryable=error.retryable) from error
    if not table.rows:
        raise invalid(f"{data.source} is empty: give a dataset with at least one row")
    return table


def _format(data: DataSettings) -> str:
    if (kind := kind_of_file(data.source)) is not None:
        return kind
    if any(artifacts.exists(artifacts.join(data.source, file)) for file in ("state.json", "dataset_dict.json")):
        return "datasets"
    if not artifacts.exists(data.source):
        remedy = artifacts.missing_bucket(data.source) or (
            "check the path or URI (a file of the Hugging Face hub is hf://datasets/OWNER/NAME/FILE)"
        )
        raise TaskError("artifact_missing", f"data.source: {data.source} does not exist: {remedy}")
    raise invalid(
        f"data.source: {data.source} is neither a .jsonl or .parquet file nor a saved datasets folder;"
        " set data.format to its format"
    )


def _read_jsonl(source: str) -> Table:
    try:
        numbered = list(json_rows(_decompressed(source).split(b"\n")))
    except JsonLineError as error:
        raise invalid(f"{source}, {error}") from error
    return Table(source, [row for _, row in numbered], [number for number, _ in numbered])


def _decompressed(source: str) -> bytes:
    content = artifacts.read_bytes(source)
    compression = infer_compression(source)
    if compression is None:
        return content
    try:
        with compr[compression](io.BytesIO(content), mode="rb") as file:
            return bytes(file.read())
    except (OSError, EOFError, ValueError) as error:
        raise invalid(f"{source} is not a readable {compression} file ({error})") from error


def _read_parquet(source: str) -> Table:
    content = artifacts.read_bytes(source)
    try:
        rows = table_of(content).to_pylist()
    except pa.ArrowException as error:
        raise invalid(f"{source} is not a readable Parquet file ({error})") from error
    return Table(source, rows)


def _read_datasets(source: str) -> Table:
    # Slow to import, and only needed for this format.
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(source)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise invalid(f"{source} is not a readable folder of a saved dataset ({error})") from error
    if isinstance(loaded, DatasetDict):
        if "train" not in loaded and len(loaded) != 1:
            raise invalid(f"{source} has the splits {', '.join(loaded)}; name the folder of one of them")
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    return Table(source, loaded.with_format(None).to_list())


# --- columns -----------------------------------------------------------------------------------------------------


def prompt_column(table: Table, data: DataSettings) -> str:
    """Return the column of the prompt.

    Raises:
        TaskError: there is no such column.
    """
    return _column(table, data.prompt_column, PROMPT_COLUMNS, "data.promptColumn") or _no_column(
        table, f"no prompt column (one of {', '.join(PROMPT_COLUMNS)})", "data.promptColumn"
    )


def ground_truth_column(table: Table, data: DataSettings) -> str | None:
    """Return the column of the ground truth; None if there is none.

    Raises:
        TaskError: the job names a column that does not exist.
    """
    return _column(table, data.ground_truth_column, GROUND_TRUTH_COLUMNS, "data.groundTruthColumn")


def _column(table: Table, named: str | None, usual: Iterable[str], setting: str) -> str | None:
    def there(column: str) -> bool:
        return any(lookup(row, column) is not None for row in table.rows)

    if named is not None:
        return named if there(named) else _no_column(table, f"no column {named!r}", setting)
    return next(filter(there, usual), None)


def _no_column(table: Table, lack: str, setting: str) -> str:
    raise invalid(f"{table.source} has {lack}; it has {', '.join(table.columns)}: set {setting} to one of them")


def invalid(message: str) -> TaskError:
    """Return the error for unusable data."""
    return TaskError("data_invalid", message)
