"""Building one model at a time: transformers replaces torch's initialisers for the whole process while it builds one.

Two threads that did so at once could leave the replacements behind for good. New parts of a model after that, such as
an adapter or a critic's head, would hold what the memory held before.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.initialization import no_init_weights

_building = threading.RLock()


@contextmanager
def building() -> Iterator[None]:
    """While this process builds a model with initialised weights."""
    with _building:
        yield


@contextmanager
def building_uninitialized() -> Iterator[None]:
    """While this process builds a model all of whose weights are loaded afterwards."""
    with _building, no_init_weights():
        yield
