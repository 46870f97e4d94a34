"""The pointer file, which names the model that a new pod loads before it is ready.

A pod's environment stays the same for the whole job, so it names this file, which the control plane overwrites.
"""

import logging

from pydantic import ValidationError

from rlhfless_functions import artifacts
from rlhfless_functions.api import Preload

logger = logging.getLogger(__name__)


def write_pointer(uri: str, pointer: Preload | None) -> None:
    """Set the model that pods load from now on; None for nothing.

    Raises:
        ArtifactError: it can't be written.
    """
    if pointer is None:
        artifacts.remove(uri)
    else:
        artifacts.write_bytes(uri, pointer.model_dump_json().encode())


def read_pointer(uri: str) -> Preload | None:
    """Read the model to load; None if the file is missing or unreadable. Then the first request reports the error."""
    try:
        return Preload.model_validate_json(artifacts.read_bytes(uri))
    except artifacts.ArtifactMissingError:
        return None
    except (artifacts.ArtifactError, ValidationError, OSError) as error:
        logger.warning("the name of the model to load could not be read from %s: %s", uri, error)
        return None
