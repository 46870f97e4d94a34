"""The store's errors as a task's. No torch here."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlhfless_functions import artifacts
from rlhfless_functions.runtime.task import TaskError


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn the store's errors into the task's."""
    try:
        yield
    except artifacts.ArtifactError as error:
        raise TaskError(error.reason, str(error), retryable=error.retryable) from error
