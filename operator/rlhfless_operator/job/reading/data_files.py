"""The columns of a dataset's files, found without reading the files into memory."""

import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.compression import compr
from fsspec.utils import infer_compression

from rlhfless_functions.data.rows import JsonLineError, Row, json_rows, kind_of_file, lookup
from rlhfless_functions.settings import DataSettings


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


def read_columns(data: DataSettings, path: Path, wanted: Iterable[str]) -> Columns | None:
    """Read the columns of a local dataset.

    Args:
        data: how to read it.
        path: its path.
        wanted: columns to look for; a dot separates a nested column from its parent.

    Returns:
        None if the columns can't be found out: for Parquet without pyarrow, and for files of an unknown kind.

    Raises:
        UnreadableDataError: the dataset is damaged, or has no rows.
    """
    match _format(data, path):
        case "jsonl":
            return _of_rows(_rows(path), frozenset(wanted), path)
        case "parquet" if importlib.util.find_spec("pyarrow") is not None:
            return _of_shape(_parquet_shape(path), wanted)
        case "datasets":
            return _of_shape(_saved_shape(path), wanted)
    return None


def _format(data: DataSettings, path: Path) -> str | None:
    if data.format != "auto":
        return data.format
    return kind_of_file(path.name) or ("datasets" if path.is_dir() else None)


def _rows(path: Path) -> Iterator[Row]:
    try:
        yield from (row for _, row in json_rows(_lines(path)))
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


def _saved_shape(folder: Path) -> dict[str, Any]:
    """Return the same for a folder that `datasets` saved. If it has several splits, use `train`."""

    def below(feature: Any) -> Any:
        is_struct = isinstance(feature, dict) and "_type" not in feature
        return {name: below(inner) for name, inner in feature.items()} if is_struct else True

    try:
        if (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
            folder = folder / ("train" if "train" in splits else splits[0])
        features = json.loads((folder / "dataset_info.json").read_bytes())["features"]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UnreadableDataError(
            f"{folder} is not a folder written by save_to_disk", "name such a folder, or a .jsonl or .parquet file"
        ) from error
    return cast(dict[str, Any], below(features))
