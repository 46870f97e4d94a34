"""Which columns a dataset's files have, as far as that can be told without reading them into memory."""

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
    """The dataset can't be read as what it is.

    Args:
        message: what is wrong, with the line where there is one.
        remedy: what to do about it.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Columns:
    """What columns a dataset has."""

    names: list[str]
    """Of the outermost ones, in the order of their first appearance."""
    held: frozenset[str]
    """Which of the wanted ones some row has a value in."""


def read_columns(data: DataSettings, path: Path, wanted: Iterable[str]) -> Columns | None:
    """The columns of a local dataset.

    Args:
        data: how it is read.
        path: where it is.
        wanted: columns to look for; a dot leads into a nested one.

    Returns:
        None where nothing here can tell: Parquet without pyarrow, and files of an unknown kind.

    Raises:
        UnreadableDataError: it is damaged, or has no rows.
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
    """Names of columns, those of nested ones below them; only the file's footer is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def below(kind: Any) -> Any:
        return {field.name: below(field.type) for field in kind} if pa.types.is_struct(kind) else True

    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowException) as error:
        raise UnreadableDataError(f"{path} is no readable Parquet file ({error})", "check the file") from error
    return {field.name: below(field.type) for field in schema}


def _saved_shape(folder: Path) -> dict[str, Any]:
    """The same of a folder that `datasets` saved; of its split `train`, where it has several."""

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
            f"{folder} is no folder of a saved dataset", "name a .jsonl or .parquet file, or what save_to_disk wrote"
        ) from error
    return cast(dict[str, Any], below(features))
