"""The store's errors as a task's. No torch here.

Errors come in two steps, so that the store may be used where there is no task: the control plane does. What a file
system raises becomes an `ArtifactError` inside `artifacts`, which says why; whoever works for a task makes that its own
with `store_errors`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rlhfless_functions import artifacts
from rlhfless_functions.runtime.task import TaskError


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn the store's errors into the task's.

    Raises:
        TaskError: with the reason of an `ArtifactError` that is raised within the block, and as retryable as it is.
    """
    try:
        yield
    except artifacts.ArtifactError as error:
        raise TaskError(error.reason, str(error), retryable=error.retryable) from error
