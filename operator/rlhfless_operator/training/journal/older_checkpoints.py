"""The checkpoints of a job, from which an older one serves if the newest is damaged.

A learner that starts from an older one repeats more steps, and comes to the same bits. So nothing else of the job goes
back: weights, records and position in the data stay.
"""

import re

from rlhfless_functions import artifacts
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.status import CheckpointStatus

_STEP = re.compile(r"/step-(\d{6,})$")


def checkpoints_until(folder: JobFolder, newest: str) -> list[str]:
    """Return the URIs of a job's checkpoints up to the step of one, the oldest first.

    Args:
        newest: a checkpoint, which a list of the store may lack, or what a learner that was let go has saved.

    Raises:
        ArtifactError: the store does not answer.
    """
    root = folder.file("checkpoints")
    # One that could not be written to its end has no manifest.
    found = {_below(root, uri) for uri in artifacts.list_files(root) if uri.endswith(f"/{artifacts.MANIFEST}")}
    if newest.startswith(root):
        found.add(newest)
    steps = {uri: checkpoint_step(uri) for uri in found if _STEP.search(uri)}
    return sorted((uri for uri, step in steps.items() if step <= checkpoint_step(newest)), key=checkpoint_step)


def checkpoint_step(uri: str) -> int:
    """Return the step after which a checkpoint was written."""
    found = _STEP.search(uri)
    assert found is not None
    return int(found[1])


def older_checkpoints(folder: JobFolder, damaged: CheckpointStatus) -> list[CheckpointStatus | None]:
    """Return the checkpoints before a damaged one, the newest first. The last is None: the model as given.

    Raises:
        ArtifactError: the store does not answer.
    """
    before = [uri for uri in checkpoints_until(folder, damaged.uri) if uri != damaged.uri]
    return [*(CheckpointStatus(step=checkpoint_step(uri), uri=uri) for uri in reversed(before)), None]


def _below(root: str, uri: str) -> str:
    """Return the folder right below `root` that has this file."""
    return artifacts.join(root, uri[len(root) :].strip("/").split("/")[0])
