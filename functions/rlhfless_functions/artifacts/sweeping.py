"""Garbage collection: removes all files that are not to be kept."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path, PurePosixPath

from rlhfless_functions.artifacts.errors import writing
from rlhfless_functions.artifacts.fencing import check_fence
from rlhfless_functions.artifacts.files import TEMPORARY, discard, is_held, join, local_path, remote, walk
from rlhfless_functions.artifacts.manifest import MANIFEST


def sweep(root: str, keep: Collection[str]) -> list[str]:
    """Remove every file below `root` that is not at or below a kept URI, and the folders left empty.

    Unfinished files of a crash are removed too, even below a kept URI. Files that a live process of this machine is
    writing stay. Manifests are removed first, because an interruption must leave no manifest without its files. A fence
    holds; see `fencing`.

    Args:
        root: the folder to clean.
        keep: URIs of the files and folders to keep, in any spelling; they need not exist. In a store that is not on the
            local disk, they must include everything that is being published.

    Returns:
        URIs of the removed files, sorted.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
        ArtifactUnwritableError: if a file cannot be removed.
    """
    base = _place(root)
    kept = {_place(uri) for uri in keep}
    doomed = sorted(name for name in walk(root) if not _stays(base, PurePosixPath(name), kept))
    manifests = [name for name in doomed if PurePosixPath(name).name == MANIFEST]
    others = [name for name in doomed if PurePosixPath(name).name != MANIFEST]
    # What comes after the check is not on the list.
    check_fence()
    with writing(root):
        if local_path(root) is None:
            filesystem, path = remote(root)
            for chosen in filter(None, (manifests, others)):
                filesystem.rm([join(path, name) for name in chosen])
        else:
            for name in (*manifests, *others):
                _remove(Path(base, name))
            _remove_empty_folders(base, kept)
    return [join(root, name) for name in doomed]


def _place(uri: str) -> PurePosixPath:
    """Return the one spelling of a URI, for comparisons."""
    path = local_path(uri)
    if path is not None:
        return PurePosixPath(os.path.realpath(path))
    filesystem, name = remote(uri)
    return PurePosixPath(filesystem.unstrip_protocol(name))


def _stays(base: PurePosixPath, name: PurePosixPath, kept: set[PurePosixPath]) -> bool:
    for depth, part in enumerate(name.parts):
        if TEMPORARY.fullmatch(part):
            return is_held(Path(base, *name.parts[: depth + 1]))
    place = base / name
    return place in kept or any(parent in kept for parent in place.parents)


def _remove_empty_folders(base: PurePosixPath, kept: set[PurePosixPath]) -> None:
    to_kept = {parent for place in kept for parent in place.parents}
    for folder, _, _ in os.walk(base, topdown=False):
        place = PurePosixPath(folder)
        if place != base and place not in to_kept and not _stays(base, place.relative_to(base), kept):
            with suppress(OSError):  # It is not empty.
                _remove(Path(folder))


def _remove(path: Path) -> None:
    if TEMPORARY.fullmatch(path.name):
        discard(path)
    elif path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
