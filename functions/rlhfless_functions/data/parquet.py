"""Parquet tables through the artifact store. This module does not import torch.

Columns are converted from and to plain buffers: pyarrow's own conversion is many times slower for long lists of
numbers, and its first use imports pandas, which would delay a cold start by half a second.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhfless_functions import artifacts

_NUMBERS = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float32(): np.float32, pa.float64(): np.float64}


def write_table(uri: str, columns: Mapping[str, Sequence[Any]], schema: pa.Schema) -> None:
    """Write columns of Python values, atomically. The file's metadata has its checksum.

    Args:
        uri: the file.
        columns: the schema's columns; structs and maps as mappings.
        schema: schema of strings, booleans, numbers, and lists, structs and maps of them.

    Raises:
        ArtifactUnwritableError: it can't be written.
    """
    table = pa.Table.from_arrays([array(columns[field.name], field.type) for field in schema], schema=schema)
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, schema, compression="zstd") as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({artifacts.KEY: artifacts.BLANK})
    artifacts.write_bytes(uri, artifacts.seal(buffer.getvalue()))


def read_table(uri: str, schema: pa.Schema, optional: Sequence[pa.Field] = ()) -> pa.Table:
    """Read the columns of a schema.

    Args:
        uri: the file.
        schema: columns that it must have.
        optional: columns that are read if it has them.

    Raises:
        ArtifactMissingError: the file can't be read.
        ArtifactCorruptError: it is not a Parquet file with these columns, or has changed since it was written.
    """
    data = artifacts.read_bytes(uri)
    if not artifacts.is_sound(data):
        raise unreadable(uri, "its checksum is another: some of it has changed since it was written")
    try:
        table = table_of(data)
        present = [field for field in optional if field.name in table.column_names]
        wanted = pa.schema([*schema, *present]) if present else schema
        return table.select(wanted.names).cast(wanted)
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise unreadable(uri, str(error)) from error


def table_of(content: bytes) -> pa.Table:
    """Return the table in a Parquet file's content.

    It is read without Arrow's threads. One of them may be the last to hold the content, and aborts the process if the
    interpreter ends meanwhile (apache/arrow#34314).

    Raises:
        pa.ArrowException, ValueError, OSError: the content is not a Parquet file.
    """
    return pq.ParquetFile(pa.BufferReader(content)).read(use_threads=False)


def unreadable(uri: str, problem: str) -> artifacts.ArtifactCorruptError:
    """Return the error for a damaged file."""
    return artifacts.ArtifactCorruptError(
        f"{uri} is not a readable file of this kind ({problem}); restore it from a copy. Without one, remove its"
        " folder and the same step's folder in results/: a step that is not done is taken again"
    )


def array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an Arrow array of Python values, None included."""
    # Arrays among the values define their own equality. Numbers are many, and faster to search by equality.
    some_none = None in values if kind in _NUMBERS else any(value is None for value in values)
    validity = _bits(value is not None for value in values) if some_none else None

    def made(*buffers: pa.Buffer, children: Sequence[pa.Array] = ()) -> pa.Array:
        return pa.Array.from_buffers(kind, len(values), [validity, *buffers], children=list(children))

    if kind in _NUMBERS:
        present = values if validity is None else [0 if value is None else value for value in values]
        return made(pa.py_buffer(np.array(present, _NUMBERS[kind])))
    if pa.types.is_boolean(kind):
        return made(_bits(map(bool, values)))
    if pa.types.is_string(kind):
        texts = [b"" if value is None else value.encode() for value in values]
        return made(_offsets(texts), pa.py_buffer(b"".join(texts)))
    if pa.types.is_struct(kind):
        return made(children=[array([value[field.name] for value in values], field.type) for field in kind])
    rows = [() if value is None else value for value in values]
    if pa.types.is_map(kind):
        pairs = pa.struct([kind.key_field, kind.item_field])
        keys = array(list(chain.from_iterable(rows)), kind.key_type)
        items = array([item for row in rows for item in dict(row).values()], kind.item_type)
        entries = pa.Array.from_buffers(pairs, len(keys), [None], children=[keys, items])
    else:
        entries = array(list(chain.from_iterable(rows)), kind.value_type)
    return made(_offsets(rows), children=[entries])


def values(column: pa.ChunkedArray) -> list[Any]:
    """Return a column as Python values, None included; maps as lists of pairs."""
    if not (pa.types.is_list(column.type) and column.type.value_type in _NUMBERS):
        return cast(list[Any], column.to_pylist())
    lists = column.combine_chunks()
    child = lists.values
    numbers = np.frombuffer(child.buffers()[1] or b"", _NUMBERS[child.type])[child.offset :].tolist()
    rows = [numbers[start:end] for start, end in pairwise(lists.offsets.to_pylist())]
    if lists.null_count:
        return [row if valid else None for row, valid in zip(rows, lists.is_valid().to_pylist(), strict=True)]
    return rows


def _offsets(rows: Iterable[Sequence[Any] | Mapping[Any, Any]]) -> pa.Buffer:
    return pa.py_buffer(np.array([0, *accumulate(map(len, rows))], np.int32))


def _bits(flags: Iterable[bool]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.fromiter(flags, np.bool_), bitorder="little"))
