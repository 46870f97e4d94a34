"""Parquet tables through the artifact store. No torch here."""

import io
from itertools import pairwise
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rlhfless_functions import artifacts


def write_table(uri: str, table: pa.Table) -> None:
    """Write a table, atomically.

    Raises:
        ArtifactUnwritableError: if it cannot be written.
    """
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    artifacts.write_bytes(uri, buffer.getvalue())


def read_table(uri: str, schema: pa.Schema) -> pa.Table:
    """Read the columns of a schema.

    Raises:
        ArtifactMissingError: if the file cannot be read.
        ArtifactCorruptError: if it is no Parquet file with these columns.
    """
    data = artifacts.read_bytes(uri)
    try:
        table = pq.read_table(pa.BufferReader(data))
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise unreadable(uri, str(error)) from error


def unreadable(uri: str, problem: str) -> artifacts.ArtifactCorruptError:
    """The error of a file that is not what it should be."""
    return artifacts.ArtifactCorruptError(
        f"{uri} is not a readable file of this kind ({problem}): remove it so that it is made again"
    )


def values(column: pa.ChunkedArray) -> list[Any]:
    """A column as Python values; lists of numbers go through numpy, many times faster than pyarrow's own way."""
    if not (pa.types.is_list(column.type) and pa.types.is_primitive(column.type.value_type)):
        return cast(list[Any], column.to_pylist())
    array = column.combine_chunks()
    offsets = array.offsets.to_pylist()
    numbers = array.values.to_numpy(zero_copy_only=False).tolist()
    rows = [numbers[start:end] for start, end in pairwise(offsets)]
    if array.null_count:
        return [row if valid else None for row, valid in zip(rows, array.is_valid().to_pylist(), strict=True)]
    return rows
