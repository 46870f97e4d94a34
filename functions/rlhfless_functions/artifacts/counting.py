"""Counts of everything that this process has fetched."""

import threading

from rlhfless_functions.api import WeightsFetched

_fetched = WeightsFetched()
_counting = threading.Lock()


def fetched() -> WeightsFetched:
    """Return the sums since this process began."""
    return _fetched


def count(**more: int) -> None:
    """Add to the sums, by the fields of `WeightsFetched`."""
    global _fetched
    with _counting:
        sums = {name: getattr(_fetched, name) + number for name, number in more.items()}
        _fetched = _fetched.model_copy(update=sums)
