"""The check, before training, that the rewards which compare with ground truths can read them."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlhfless_functions.rewards.truths import UnreadableTruthError, accepted

_log = logging.getLogger(__name__)


def unreadable_truths(kind: str, truths: Sequence[Any], seconds: float) -> list[tuple[int, str]]:
    """Return the positions of ground truths that a reward can't read, and what each is. Equal truths are read once.

    Args:
        kind: `math` or `exact_match`.
        truths: one per row.
        seconds: most time to spend; the rest is then left to the workers, which refuse such truths when they meet them.
    """
    read: Callable[[Any], object] = accepted
    if kind == "math":
        # SymPy takes a second to import.
        from rlhfless_functions.rewards.mathematics.truths import readings_of

        read = readings_of
    known: dict[str, str | None] = {}
    found, deadline = [], time.monotonic() + seconds
    for position, truth in enumerate(truths):
        key = repr(truth)
        if key not in known:
            if time.monotonic() > deadline:
                _log.warning("ground truths from row %d on were not checked, to begin sooner", position)
                break
            try:
                read(truth)
                known[key] = None
            except UnreadableTruthError as error:
                known[key] = str(error)
        fault = known[key]
        if fault is not None:
            found.append((position, fault))
    return found
