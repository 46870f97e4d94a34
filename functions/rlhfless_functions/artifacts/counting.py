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


def count(**more: int) -> None:
    """Add to the sums; the arguments are the fields of `Fetched`."""
    global _fetched
    with _counting:
        _fetched = replace(_fetched, **{name: getattr(_fetched, name) + number for name, number in more.items()})
