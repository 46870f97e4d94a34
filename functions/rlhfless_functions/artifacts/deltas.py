"""The changes of a file since another version, in few bytes and without loss.

The two versions are combined bit by bit (XOR). This leaves zeros where nothing changed, and small numbers where a
weight changed little. The bytes of the numbers are then regrouped, all first bytes before all second ones, and
compressed with zstd. The sign, the exponent and the high bits of a weight hardly ever change, so regrouping gives long
runs of zeros.

A delta does not name its base and has no checksum of its own. Its reader checks the delta first, and then the file that
it gives.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

WORTH = 0.8
"""Share of the file's size above which a delta does not pay: reading and applying it takes time too."""

_HEADER = struct.Struct("<16sBQ")
_MAGIC = b"rlhfless-delta-1"
_LENGTH = struct.Struct("<I")
_BLOCK = 4 * 2**20
_SAMPLE = 2**18
_WIDTHS = (1, 2, 4)
_WORKERS = 4
"""Number of threads. Compression and XOR release the interpreter's lock."""
_AHEAD = 4 * _WORKERS
"""Most blocks in memory at once."""

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


def write_delta(base: Path, new: Path, delta: Path) -> bool:
    """Write the changes from one file to another.

    Numbers of one, two and four bytes are tried on a part in the middle. The size that compresses it best is used for
    the whole file.

    Args:
        base: the file that a reader has.
        new: the file that the reader is to get.
        delta: the file to write.

    Returns:
        Whether the delta is worth reading. If not, as for files of different sizes, there may be nothing at `delta`, or
        an unfinished file.

    Raises:
        OSError: if a file can't be read or written.
    """
    size = new.stat().st_size
    if not size or base.stat().st_size != size:
        return False
    old, now = _mapped(base), _mapped(new)
    middle = size // 2 // _SAMPLE * _SAMPLE
    sample = slice(middle, middle + _SAMPLE)
    width = min(_WIDTHS, key=lambda width: len(_compressed(old[sample], now[sample], width)))

    def compressed(start: int) -> bytes:
        block = slice(start, start + _BLOCK)
        return _compressed(old[block], now[block], width)

    with delta.open("wb") as file:
        written = file.write(_HEADER.pack(_MAGIC, width, size))
        for block in _in_order(compressed, range(0, size, _BLOCK)):
            written += file.write(_LENGTH.pack(len(block)) + block)
            if written > WORTH * size:
                return False
    return True


def apply_delta(base: Path, delta: Path, new: Path) -> None:
    """Make a file from another one and its changes.

    Args:
        base: the file from which the delta was made.
        delta: made by `write_delta`.
        new: the file to write; not `base`.

    Raises:
        ValueError: if `delta` is not a delta, is cut short, or belongs to a file of another size. A different base of
            the same size is not noticed.
        OSError: if a file can't be read or written.
    """
    with delta.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ValueError("it is cut short")
        magic, width, size = _HEADER.unpack(header)
        if magic != _MAGIC or width not in _WIDTHS:
            raise ValueError("it is no delta of a kind that this release knows")
        if base.stat().st_size != size:
            raise ValueError(f"its base had {size} bytes, and {base} has {base.stat().st_size}")
        old = _mapped(base)

        def restored(block: tuple[int, bytes]) -> _Bytes:
            start, compressed = block
            return _restored(old[start : start + _BLOCK], compressed, width)

        with new.open("wb") as made:
            for block in _in_order(restored, _read_blocks(file, size)):
                made.write(block.data)


def _mapped(path: Path) -> _Bytes:
    return np.memmap(path, dtype=np.uint8, mode="r")


def _in_order(make: Callable[[_Given], _Made], given: Iterable[_Given]) -> Iterator[_Made]:
    """Yield the result for each item, in the items' order. A few are computed at a time."""
    source = iter(given)
    with ThreadPoolExecutor(_WORKERS) as pool:
        while some := list(islice(source, _AHEAD)):
            yield from pool.map(make, some)


def _compressed(old: _Bytes, now: _Bytes, width: int) -> bytes:
    changed = np.bitwise_xor(old, now)
    whole = len(changed) // width * width
    apart = np.empty_like(changed)
    apart[:whole].reshape(width, -1)[:] = changed[:whole].reshape(-1, width).T
    apart[whole:] = changed[whole:]
    compressed: bytes = _codec().compress(apart, asbytes=True)
    return compressed


def _restored(old: _Bytes, block: bytes, width: int) -> _Bytes:
    try:
        apart = np.frombuffer(_codec().decompress(block, decompressed_size=len(old)), dtype=np.uint8)
    except OSError as error:
        raise ValueError(f"a block of it can't be decompressed ({error})") from error
    whole = len(old) // width * width
    restored = np.empty_like(apart)
    restored[:whole].reshape(-1, width)[:] = apart[:whole].reshape(width, -1).T
    restored[whole:] = apart[whole:]
    return np.bitwise_xor(restored, old, out=restored)


def _read_blocks(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    for start in range(0, size, _BLOCK):
        length = file.read(_LENGTH.size)
        block = file.read(*_LENGTH.unpack(length)) if len(length) == _LENGTH.size else b""
        if not block:
            raise ValueError("it is cut short")
        yield start, block


def _codec() -> Any:
    # Instances of functions have it. The control plane does not, and reads no weights.
    import pyarrow as pa

    return pa.Codec("zstd", compression_level=1)
