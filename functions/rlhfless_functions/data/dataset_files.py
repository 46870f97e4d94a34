"""Read the sources of a dataset as rows, and find the columns with a meaning."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import NoReturn

import pyarrow as pa
from fsspec.compression import compr
from fsspec.utils import infer_compression

from rlhfless_functions import artifacts
from rlhfless_functions.data.hub import read_hub
from rlhfless_functions.data.parquet import table_of
from rlhfless_functions.data.row_functions import RowFunctionError, applied
from rlhfless_functions.data.rows import (
    GROUND_TRUTH_COLUMNS,
    PROMPT_COLUMNS,
    JsonLineError,
    Row,
    json_rows,
    kind_of_file,
    lookup,
)
from rlhfless_functions.data.sources import (
    SourceError,
    choose_files,
    choose_split,
    is_pattern,
    is_saved,
    local_files,
)
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import DataSettings, MixedSource
from rlhfless_functions.settings.data import HUB


@dataclass(frozen=True)
class Table:
    """The rows of a source as read."""

    source: str
    rows: list[Row]
    lines: list[int] | None = None
    """Line of each row in its file, if it has one."""
    reading: MixedSource = field(default_factory=lambda: MixedSource(source="rows"))
    """Settings with which its rows become prompts."""
    files: tuple[tuple[int, str], ...] = ()
    """First row and name of each file, if there are several."""
    numbers: list[int] | None = None
    """Number of each row before rows were filtered."""
    filtered: int = 0
    """Rows that the user's filter left out."""

    def place(self, number: int) -> str:
        """Return the place of a row, for a message."""
        return f"{self.source}, {self.where(number)}"

    def where(self, number: int) -> str:
        """Return the place of a row in the source."""
        number = number if self.numbers is None else self.numbers[number]
        start, file = max((each for each in self.files if each[0] <= number), default=(0, ""))
        place = f"row {number - start}" if self.lines is None else f"line {self.lines[number]}"
        return f"{place} of {file}" if file else place

    def first(self, most: int) -> "Table":
        """Return the first rows alone."""
        return replace(self, rows=self.rows[:most])

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))


# --- reading -----------------------------------------------------------------------------------------------------


def read_tables(data: DataSettings) -> list[Table]:
    """Read a dataset: a table for each source.

    Raises:
        TaskError: data_invalid, or artifact_missing if a source does not exist; the message names the line or row.
    """
    return [read_table(part) for part in data.parts]


def read_table(reading: MixedSource) -> Table:
    """Read one source, and apply the user's `map` and `filter`.

    Raises:
        TaskError: as for `read_tables`.
    """
    try:
        table = _read(reading)
    except artifacts.ArtifactMissingError as error:
        raise TaskError("artifact_missing", f"data.source: {error}", retryable=error.retryable) from error
    except SourceError as error:
        raise invalid(f"data.source: {error}") from error
    if not table.rows:
        raise invalid(f"{table.source} is empty: give a dataset with at least one row")
    if reading.map is None and reading.filter is None:
        return table
    try:
        rows, numbers = applied(table.rows, reading.map, reading.filter)
    except RowFunctionError as error:
        place = table.source if error.row is None else table.place(error.row)
        raise invalid(f"{place}: {error}; correct the function") from error
    if not rows:
        raise invalid(f"data.filter ({reading.filter and reading.filter.file}) keeps no row of {table.source}")
    return replace(table, rows=rows, numbers=numbers, filtered=len(table.rows) - len(rows))


def first_rows(tables: Sequence[Table], most: int) -> list[Table]:
    """Return the first rows of each table alone."""
    return [table.first(most) for table in tables]


def _read(reading: MixedSource) -> Table:
    source = reading.source
    if source.startswith(HUB):
        return Table(source, read_hub(reading), reading=reading)
    named = kind_of_file(source) if reading.format == "auto" else reading.format
    if named is not None and not is_pattern(source):
        uris, kind = [source], named
        if reading.split is not None and kind != "datasets":
            raise SourceError(f"{source} is a file, which has no splits", "remove data.split")
    else:
        uris, kind = _files(reading)
    if kind == "datasets":
        return Table(source, _read_datasets(source, reading.split), reading=reading)
    parts = [(uri, *_READERS[kind](uri)) for uri in uris]
    starts = accumulate((len(rows) for _, rows, _ in parts), initial=0)
    lines = [line for _, _, each in parts for line in each or ()]
    return Table(
        source,
        [row for _, rows, _ in parts for row in rows],
        lines if parts[0][2] is not None else None,
        reading,
        tuple((start, uri.rpartition("/")[2]) for start, (uri, _, _) in zip(starts, parts, strict=False))
        if len(parts) > 1
        else (),
    )


def _files(reading: MixedSource) -> tuple[list[str], str]:
    """Return the files of a folder or pattern, and their format."""
    source, split = reading.source, reading.split
    path = artifacts.local_path(source)
    if path is not None and (path.exists() or is_pattern(source)):
        found = local_files(path, split) if path.is_dir() or is_pattern(source) else [path]
        uris = None if found is None else list(map(str, found))
    else:
        uris = _remote_files(source, split)
    if uris is None:
        return [source], "datasets"
    kind = kind_of_file(uris[0]) if reading.format == "auto" else reading.format
    if kind is None:
        raise SourceError(
            f"{source} is no file of JSON lines, JSON, Parquet, CSV, TSV or Arrow by its name",
            "set data.format to its format",
        )
    return uris, kind


def _remote_files(source: str, split: str | None) -> list[str] | None:
    if is_pattern(source):
        return choose_files(artifacts.matching_files(source), source, split, pattern=True)
    below = artifacts.list_files(source)
    if below:
        names = [uri.removeprefix(f"{source.rstrip('/')}/") for uri in below]
        if is_saved(names):
            return None
        if below != [source]:
            return [artifacts.join(source, name) for name in choose_files(names, source, split, pattern=False)]
    if not artifacts.exists(source):
        remedy = artifacts.missing_bucket(source) or (
            "check the path or URI (a dataset of the Hugging Face hub is hub:OWNER/NAME)"
        )
        raise TaskError("artifact_missing", f"data.source: {source} does not exist: {remedy}")
    return [source]


_Rows = tuple[list[Row], list[int] | None]
"""Rows, and the line of each if the file has lines."""


def _read_jsonl(source: str) -> _Rows:
    content = _decompressed(source)
    if content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        return _read_array(source, content), None
    try:
        numbered = list(json_rows(content.split(b"\n")))
    except JsonLineError as error:
        raise invalid(f"{source}, {error}") from error
    return [row for _, row in numbered], [number for number, _ in numbered]


def _read_array(source: str, content: bytes) -> list[Row]:
    """Read a JSON file that is one list of objects."""
    try:
        rows = json.loads(content)
    except ValueError as error:
        raise invalid(f"{source} is neither JSON lines nor a JSON list of objects ({error})") from error
    other = next((number for number, row in enumerate(rows) if not isinstance(row, dict)), None)
    if other is not None:
        raise invalid(f"{source}: item {other} of its list holds {type(rows[other]).__name__}, not a JSON object")
    return list(rows)


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


def _read_separated(source: str, delimiter: str) -> _Rows:
    """Read a CSV or TSV file. Every value is text, as it is written; an empty one is missing."""
    try:
        text = io.StringIO(_decompressed(source).decode("utf-8-sig"), newline="")
    except UnicodeDecodeError as error:
        raise invalid(f"{source} is not UTF-8 ({error}); save it as UTF-8") from error
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    rows, lines = [], []
    try:
        for row in reader:
            if None in row:
                raise invalid(f"{source}, line {reader.line_num} has more cells than the first line names columns")
            rows.append({name: value or None for name, value in row.items()})
            lines.append(reader.line_num)
    except csv.Error as error:
        raise invalid(f"{source}, line {reader.line_num} is no line of a table ({error})") from error
    return rows, lines


def _read_parquet(source: str) -> _Rows:
    content = artifacts.read_bytes(source)
    try:
        return table_of(content).to_pylist(), None
    except pa.ArrowException as error:
        raise invalid(f"{source} is not a readable Parquet file ({error})") from error


def _read_arrow(source: str) -> _Rows:
    content = pa.BufferReader(artifacts.read_bytes(source))
    for opened in (pa.ipc.open_file, pa.ipc.open_stream):
        content.seek(0)
        try:
            return opened(content).read_all().to_pylist(), None
        except pa.ArrowException as error:
            reason = error
    raise invalid(f"{source} is not a readable Arrow file ({reason})")


def _read_datasets(source: str, split: str | None) -> list[Row]:
    # Slow to import, and only needed for this format.
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(source)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise invalid(f"{source} is not a readable folder of a saved dataset ({error})") from error
    if isinstance(loaded, DatasetDict):
        loaded = loaded[choose_split(list(loaded), split, source)]
    elif split is not None:
        raise SourceError(f"{source} was saved without splits", "remove data.split")
    rows: list[Row] = loaded.with_format(None).to_list()
    return rows


_READERS: dict[str, Callable[[str], _Rows]] = {
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "csv": partial(_read_separated, delimiter=","),
    "tsv": partial(_read_separated, delimiter="\t"),
    "arrow": _read_arrow,
}


# --- columns -----------------------------------------------------------------------------------------------------


def prompt_column(table: Table, *, continued: bool = False) -> str:
    """Return the column of the prompt.

    Args:
        table: the source.
        continued: whether the model continues answers. If not, a column whose chats are all answered counts last.

    Raises:
        TaskError: there is no such column.
    """
    named = table.reading.prompt_column
    if named is not None:
        return named if _is_there(table, named) else _no_column(table, f"no column {named!r}", "data.promptColumn")
    usual = _prompt_columns(table, continued=continued)
    if not usual:
        _no_column(table, f"no prompt column (one of {', '.join(PROMPT_COLUMNS)})", "data.promptColumn")
    return usual[0]


def ground_truth_column(table: Table) -> str | None:
    """Return the column of the ground truth; None if there is none.

    Raises:
        TaskError: the job names a column that does not exist.
    """
    named = table.reading.ground_truth_column
    if named is not None and not _is_there(table, named):
        _no_column(table, f"no column {named!r}", "data.groundTruthColumn")
    return named or next(iter(_those_there(table, GROUND_TRUTH_COLUMNS)), None)


def choices_of_columns(table: Table, *, continued: bool = False) -> Iterator[str]:
    """Yield a remark for each column with a meaning that has several of its usual names: which one was taken."""
    prompts, truths = _prompt_columns(table, continued=continued), _those_there(table, GROUND_TRUTH_COLUMNS)
    for what, named, found, setting in (
        ("prompt", table.reading.prompt_column, prompts, "data.promptColumn"),
        ("ground truth", table.reading.ground_truth_column, truths, "data.groundTruthColumn"),
    ):
        if named is None and len(found) > 1:
            taken, *others = found
            yield (
                f"the {what} is column {taken!r}; {' and '.join(map(repr, others))} could be it too: set {setting} to"
                " say which one it is"
            )


def _prompt_columns(table: Table, *, continued: bool) -> list[str]:
    """Return the columns that may be the prompt, the likeliest first."""
    found = _those_there(table, PROMPT_COLUMNS)
    return found if continued else sorted(found, key=lambda column: _is_answered(table, column))


def _is_answered(table: Table, column: str) -> bool:
    """Return whether all values of a column are chats that end with the assistant's message."""
    values = [value for row in table.rows if (value := lookup(row, column)) is not None]
    return all(isinstance(value, list) and value and _role(value[-1]) == "assistant" for value in values)


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _those_there(table: Table, columns: Iterable[str]) -> list[str]:
    return [column for column in columns if _is_there(table, column)]


def _is_there(table: Table, column: str) -> bool:
    return any(lookup(row, column) is not None for row in table.rows)


def _no_column(table: Table, lack: str, setting: str) -> NoReturn:
    raise invalid(f"{table.source} has {lack}; it has {', '.join(table.columns)}: set {setting} to one of them")


def invalid(message: str) -> TaskError:
    """Return the error for unusable data."""
    return TaskError("data_invalid", message)
