"""Building one model at a time: transformers replaces torch's initialisers for the whole process while it builds one.

If two threads did so at once, the replacements could stay for good. New parts of a model, such as an adapter or a
critic's head, would then keep the memory's old content.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.initialization import no_init_weights

_building = threading.RLock()


@contextmanager
def building() -> Iterator[None]:
    """Let only this thread of the process build a model with initialised weights, during the block."""
    with _building:
        yield


@contextmanager
def building_uninitialized() -> Iterator[None]:
    """Let only this thread of the process build a model whose weights are all loaded afterwards, during the block."""
    with _building, no_init_weights():
        yield
