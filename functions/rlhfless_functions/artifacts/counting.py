"""What this process has fetched, counted."""

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fetched:
    """What this process has fetched from stores that are no file systems of this machine."""

    bytes: int = 0
    deltas: int = 0
    """Files that were made of another version's and of what changed."""
    refused_deltas: int = 0
    """Files that could not be: the delta was missing or damaged, or gave another file. They were fetched whole."""
    relayed_bytes: int = 0
    """Fetched from other instances; they are not among `bytes`."""
    refused_sources: int = 0
    """Instances that did not send a file, or sent another one. The store was read instead."""


_fetched = Fetched()
_counting = threading.Lock()


def fetched() -> Fetched:
    """The sums since this process began."""
    return _fetched


def count(
    size: int = 0,
    *,
    deltas: int = 0,
    refused_deltas: int = 0,
    relayed_bytes: int = 0,
    refused_sources: int = 0,
) -> None:
    """Add to the sums; the arguments are the fields of `Fetched`, `size` is its bytes."""
    global _fetched
    with _counting:
        before = _fetched
        _fetched = replace(
            before,
            bytes=before.bytes + size,
            deltas=before.deltas + deltas,
            refused_deltas=before.refused_deltas + refused_deltas,
            relayed_bytes=before.relayed_bytes + relayed_bytes,
            refused_sources=before.refused_sources + refused_sources,
        )
