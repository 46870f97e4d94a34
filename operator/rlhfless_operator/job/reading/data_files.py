"""The columns of a dataset's files, found without reading the files into memory."""

import csv
import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.compression import compr
from fsspec.utils import infer_compression

from rlhfless_functions.data.rows import JsonLineError, Row, json_rows, kind_of_file, lookup, surrogate_fault
from rlhfless_functions.data.sources import SourceError, choose_split, local_files
from rlhfless_functions.settings import MixedSource


class UnreadableDataError(ValueError):
    """The dataset can't be read in its format.

    Args:
        message: the fault, with the line number if known.
        remedy: its remedy.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Columns:
    """The columns of a dataset."""

    names: list[str]
    """Names of the top-level columns, in the order of their first appearance."""
    held: frozenset[str]
    """The wanted columns in which at least one row has a value."""


def read_columns(data: MixedSource, path: Path, wanted: Iterable[str]) -> Columns | None:
    """Read the columns of a local source.

    Args:
        data: how to read it.
        path: its path, or a pattern.
        wanted: columns to look for; a dot separates a nested column from its parent.

    Returns:
        None if the columns can't be found out: for Parquet without pyarrow, and for formats that are only read whole.

    Raises:
        UnreadableDataError: the source is damaged, has no rows, or does not tell which files are meant.
    """
    wanted = frozenset(wanted)
    try:
        files = local_files(path, data.split) if data.format != "datasets" else None
        if files is None:
            return _of_shape(_saved_shape(path, data.split), wanted)
    except SourceError as error:
        raise UnreadableDataError(error.message, error.remedy) from error
    kind = kind_of_file(files[0].name) if data.format == "auto" else data.format
    if kind is None:
        message = f"{path} is no file of JSON lines, JSON, Parquet, CSV, TSV or Arrow by its name"
        raise UnreadableDataError(message, "set data.format to its format")
    found = [_columns_of(kind, file, wanted) for file in files]
    known = [columns for columns in found if columns is not None]
    if len(known) < len(found):
        return None
    names = list(dict.fromkeys(name for columns in known for name in columns.names))
    return Columns(names, frozenset().union(*(columns.held for columns in known)))


def _columns_of(kind: str, path: Path, wanted: frozenset[str]) -> Columns | None:
    match kind:
        case "jsonl" if _is_array(path):
            return None
        case "jsonl":
            return _of_rows(_rows(path, wanted), wanted, path)
        case "parquet" if importlib.util.find_spec("pyarrow") is not None:
            return _of_shape(_parquet_shape(path), wanted)
        case "csv" | "tsv":
            return _of_first_line(path, "," if kind == "csv" else "\t", wanted)
    return None


def _is_array(path: Path) -> bool:
    """Return whether a JSON file is one list, and not a line for each row."""
    first = next((line for line in _lines(path) if line.strip()), b"")
    return first.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _of_first_line(path: Path, delimiter: str, wanted: frozenset[str]) -> Columns:
    """Return the columns that the first line of a CSV or TSV file names."""
    text = next(_lines(path), b"").decode("utf-8-sig", errors="replace")
    names = next(csv.reader([text], delimiter=delimiter), [])
    return Columns(names, wanted & frozenset(names))


def _rows(path: Path, wanted: Iterable[str]) -> Iterator[Row]:
    try:
        for number, row in json_rows(_lines(path)):
            for column in wanted:
                if fault := surrogate_fault(lookup(row, column)):
                    message, _, remedy = f"line {number} of {path}: column {column!r} {fault}".rpartition("; ")
                    raise UnreadableDataError(message, remedy)
            yield row
    except JsonLineError as error:
        raise UnreadableDataError(f"line {error.number} of {path} {error.fault}", error.remedy) from error


def _lines(path: Path) -> Iterator[bytes]:
    compression = infer_compression(str(path))
    try:
        with path.open("rb") as file:
            yield from cast(BinaryIO, file if compression is None else compr[compression](file, mode="rb"))
    except (OSError, EOFError, KeyError) as error:
        raise UnreadableDataError(f"{path} can't be read ({error})", "check the file") from error


def _of_rows(rows: Iterator[dict[str, Any]], wanted: frozenset[str], path: Path) -> Columns:
    names: dict[str, None] = {}
    missing = set(wanted)
    count = 0
    for row in rows:
        count += 1
        names.update(dict.fromkeys(row))
        missing -= {column for column in missing if lookup(row, column) is not None}
    if not count:
        raise UnreadableDataError(f"{path} is empty", "give a dataset with at least one row")
    return Columns(list(names), wanted - missing)


def _of_shape(shape: dict[str, Any], wanted: Iterable[str]) -> Columns:
    return Columns(list(shape), frozenset(column for column in wanted if lookup(shape, column) is not None))


def _parquet_shape(path: Path) -> dict[str, Any]:
    """Return the names of columns, nested columns below their parents. Only the file's footer is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def below(kind: Any) -> Any:
        return {field.name: below(field.type) for field in kind} if pa.types.is_struct(kind) else True

    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise UnreadableDataError(f"{path} is not a readable Parquet file ({error})", "check the file") from error
    return {field.name: below(field.type) for field in schema}


def _saved_shape(folder: Path, split: str | None) -> dict[str, Any]:
    """Return the same for a folder that `datasets` saved. If it has several splits, use `train`."""

    def below(feature: Any) -> Any:
        is_struct = isinstance(feature, dict) and "_type" not in feature
        return {name: below(inner) for name, inner in feature.items()} if is_struct else True

    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
            folder = folder / choose_split(splits, split, str(folder))
        features = json.loads((folder / "dataset_info.json").read_bytes())["features"]
    except SourceError:
        raise
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UnreadableDataError(
            f"{folder} is not a folder written by save_to_disk", "name such a folder, or a .jsonl or .parquet file"
        ) from error
    return cast(dict[str, Any], below(features))
