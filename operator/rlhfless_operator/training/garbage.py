"""Which artifacts nobody needs any more."""

import re
from collections.abc import Collection

from rlhfless_functions import artifacts
from rlhfless_operator.training.folder import JobFolder
from rlhfless_operator.training.status import RLHFJobStatus

_STEP = re.compile(r"step-(\d+)")


def remove_garbage(folder: JobFolder, status: RLHFJobStatus, keep_checkpoints: int) -> None:
    """Remove what neither the status names nor a fresh learner would need, nor the step that runs now.

    Kept are the newest and the best weights, the newest critic, the newest checkpoints, and the batches of all steps
    since the newest checkpoint.
    """
    replay_from = status.checkpoint.step + 1 if status.checkpoint else 1
    named = {reference.version for reference in (status.weights, status.best) if reference is not None}
    _remove_steps(folder, "weights", before=status.step, keep=named)
    _remove_steps(folder, "critics", before=status.step)
    _remove_steps(folder, "rollouts", before=status.step + 1)
    _remove_steps(folder, "batches", before=replay_from)
    _remove_steps(folder, "results", before=replay_from)
    _remove_steps(folder, "progress", before=status.step)
    checkpoints = sorted(_steps(folder, "checkpoints"))
    written = [step for step in checkpoints if step <= status.step]
    for step in written[:-keep_checkpoints]:
        artifacts.remove(folder.checkpoint(step))


def _steps(folder: JobFolder, kind: str) -> dict[int, set[str]]:
    """The entries of one kind, by step."""
    root = folder.file(kind)
    entries: dict[int, set[str]] = {}
    for uri in artifacts.list_files(root):
        name = uri[len(root) :].lstrip("/").split("/")[0]
        match = _STEP.match(name)
        if match:
            entries.setdefault(int(match[1]), set()).add(artifacts.join(root, name))
    return entries


def _remove_steps(folder: JobFolder, kind: str, *, before: int, keep: Collection[int] = ()) -> None:
    for step, uris in _steps(folder, kind).items():
        if step < before and step not in keep:
            for uri in uris:
                artifacts.remove(uri)
