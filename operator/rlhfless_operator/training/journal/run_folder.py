"""A job's folder is claimed before anything in it is written or removed, and only if that harms nobody's files.

A driver removes and replaces files in its job's folder: `model/`, old checkpoints, weights and results. So it claims
only an empty folder, or one that has the marker of an earlier claim. What a job reads must lie elsewhere.
"""

import os
from collections.abc import Iterator
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.journal.begun_job import document_of

MARKER = "rlhfless.json"
"""Name of the marker."""
_CONTENT = b'{"about": "This folder is the output of an rlhfless job, which removes and replaces files in it."}\n'
_BESIDE = ("leases/", "owner.json")
"""Files that may come before the marker: of drivers, and of the operator, which knows the folder's owner."""
_NAMED = 5


class FolderOfOthersError(UserError):
    """The job's folder holds files that are not a job's, or that the job reads."""


def claim_folder(job: RLHFJob, folder: JobFolder) -> None:
    """Make a folder the job's.

    Raises:
        FolderOfOthersError: it may have a user's files.
        ArtifactError: the store does not answer, or can't be written.
    """
    check_inputs(job, folder)
    if is_claimed(folder):
        return
    root = artifacts.join(folder.root, "")
    names = (uri.removeprefix(root) for uri in artifacts.list_files(folder.root))
    if others := sorted({name.split("/")[0] for name in names if not name.startswith(_BESIDE)}):
        shown = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
        raise FolderOfOthersError(
            f"{folder.root} is not empty ({shown}) and not the folder of a job, whose files rlhfless removes and"
            " replaces: choose another metadata.name or spec.artifacts.uri, or move these files away"
        )
    artifacts.create_exclusive(folder.file(MARKER), _CONTENT)


def is_claimed(folder: JobFolder) -> bool:
    """Return whether a folder is a job's.

    Raises:
        ArtifactMissingError: the store does not answer.
    """
    return artifacts.exists(folder.file(MARKER))


def check_inputs(job: RLHFJob, folder: JobFolder) -> None:
    """Check that a job reads nothing in its own folder.

    Raises:
        FolderOfOthersError: it does; the message names the field.
    """
    root = _place(folder.root)
    for path, text in _texts(document_of(job)["spec"], "spec"):
        if path != "spec.artifacts.uri" and _place(text).startswith(f"{root}/") and artifacts.exists(text):
            raise FolderOfOthersError(
                f"{path}: {text} is in the job's own folder, whose files rlhfless removes and replaces: copy it to"
                " another place, or choose another metadata.name"
            )


def _place(uri: str) -> str:
    """Return the one spelling of a URI, for comparisons."""
    path = artifacts.local_path(uri)
    return uri.rstrip("/") if path is None else os.path.realpath(path)


def _texts(content: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield all texts of a document, with the paths of their fields."""
    if isinstance(content, dict):
        for name, inner in content.items():
            yield from _texts(inner, f"{path}.{name}")
    elif isinstance(content, list):
        for number, inner in enumerate(content):
            yield from _texts(inner, f"{path}[{number}]")
    elif isinstance(content, str) and "\n" not in content and "\0" not in content:
        yield path, content
