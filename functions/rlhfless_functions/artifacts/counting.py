"""Counts of everything that this process has fetched."""

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fetched:
    """Counts of fetches from stores that are not file systems of this machine."""

    bytes: int = 0
    deltas: int = 0
    """Files made from another version's files and a delta."""
    refused_deltas: int = 0
    """Files that were fetched whole because their delta was missing or damaged, or gave another file."""
    relayed_bytes: int = 0
    """Bytes fetched from other instances; `bytes` does not include them."""
    refused_sources: int = 0
    """Instances that did not send a file, or sent another one. The store was read instead."""


_fetched = Fetched()
_counting = threading.Lock()


def fetched() -> Fetched:
    """Return the sums since this process began."""
    return _fetched


def count(**more: int) -> None:
    """Add to the sums, by the fields of `Fetched`."""
    global _fetched
    with _counting:
        _fetched = replace(_fetched, **{name: getattr(_fetched, name) + number for name, number in more.items()})
