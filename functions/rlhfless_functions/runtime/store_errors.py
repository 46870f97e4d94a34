"""The conversion of the store's errors to a task's. This module does not import torch.

There are two steps, because the control plane uses the store without a task. First, `artifacts` converts an error of a
file system to an `ArtifactError`, which says why. Then code that works for a task converts that to the task's error
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
        TaskError: the block raised an `ArtifactError`; it has the same reason and is as retryable.
    """
    try:
        yield
    except artifacts.ArtifactError as error:
        raise TaskError(error.reason, str(error), retryable=error.retryable) from error
