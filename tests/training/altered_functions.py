"""The fork server of local instances, which a test alters before it forks any.

    python -m tests.training.altered_functions PARENT

The environment says which function alters it, as MODULE:FUNCTION.
"""

import asyncio
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlhfless_functions.serving import fork_server

_ALTERATION = "RLHFLESS_ALTERATION"


@contextmanager
def altered_functions(alteration: str, **environment: str) -> Iterator[None]:
    """Have the instances of all jobs that this process drives altered.

    Args:
        alteration: the function, as MODULE:FUNCTION.
        environment: what it finds in its environment.
    """
    start = asyncio.create_subprocess_exec

    def started(*command: str, **named: Any) -> Any:
        return start(*(__name__ if part == fork_server.__name__ else part for part in command), **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", started)
        for name, value in {_ALTERATION: alteration, **environment}.items():
            patch.setenv(name, value)
        yield


if __name__ == "__main__":
    module, _, function = os.environ[_ALTERATION].partition(":")
    getattr(importlib.import_module(module), function)()
    fork_server.main()
