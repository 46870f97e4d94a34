"""The copies of published folders that this process passes on to other instances, finished or still being fetched.

A file is passed on while it grows. Its reader compares the checksum with the manifest, which it has from the store.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhfless_functions.artifacts.manifest import ManifestEntry

STUCK_SECONDS = 10.0
"""Seconds without growth after which the transfer of a file is given up, on both sides."""
_KEPT = 4
_CHUNK = 2**18
_POLL_SECONDS = 0.01


@dataclass
class Relayed:
    """A folder that this process passes on."""

    files: dict[str, ManifestEntry]
    """Files of its manifest. No other file is passed on."""
    folder: Path
    """Present folder of the files."""
    given_up: bool = False
    """Whether the files will never be complete."""


_relayed: dict[str, Relayed] = {}
_changing = threading.Lock()


def relay(copy: str, files: dict[str, ManifestEntry], folder: Path) -> Relayed:
    """Pass a folder on from now. Only the newest few folders are passed on.

    Args:
        copy: name of the folder's copies.
        files: the folder's files, by path.
        folder: local folder in which the files are or appear.
    """
    with _changing:
        _relayed.pop(copy, None)
        _relayed[copy] = relayed = Relayed(files, folder)
        for old in list(_relayed)[:-_KEPT]:
            del _relayed[old]
    return relayed


def relayed(copy: str) -> Relayed | None:
    """Return the folder whose copies have this name; None if this process does not pass it on."""
    found = _relayed.get(copy)
    return found if found is not None and not found.given_up else None


async def growing_file(relayed: Relayed, name: str, stopped: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yield the bytes of a file of the manifest as they arrive.

    They end early if the folder is given up, the file stops growing, or `stopped` returns True.
    """
    left = relayed.files[name].size
    grew = time.monotonic()
    file = None
    try:
        while left:
            if file is None:
                with suppress(FileNotFoundError):
                    file = (relayed.folder / name).open("rb", buffering=0)
            if file is not None and (data := file.read(min(_CHUNK, left))):
                left -= len(data)
                grew = time.monotonic()
                yield data
            elif relayed.given_up or stopped() or time.monotonic() - grew > STUCK_SECONDS:
                return
            else:
                await asyncio.sleep(_POLL_SECONDS)
    finally:
        if file is not None:
            file.close()
