"""Garbage collection: everything goes that nobody names."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path, PurePosixPath

from rlhfless_functions.artifacts.errors import writing
from rlhfless_functions.artifacts.files import TEMPORARY, join, local_path, remote, walk
from rlhfless_functions.artifacts.manifest import MANIFEST


def sweep(root: str, keep: Collection[str]) -> list[str]:
    """Remove every file below `root` that is not at or below one of the kept URIs, and folders left empty.

    What a crash left half-written for a kept URI goes, too, once that URI has been published or written; until then it
    may still be in the making. Manifests go first, so that an interruption leaves no manifest without its files.

    Args:
        root: the folder to clean.
        keep: URIs of files and folders that stay, in any spelling; those that do not exist yet are being made,
            and whatever is being made must be among them.

    Returns:
        URIs of the removed files, sorted.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
        ArtifactUnwritableError: if a file cannot be removed.
    """
    base = _place(root)
    kept = {_place(uri) for uri in keep}
    names = walk(root)
    present = {base / name for name in names}
    doomed = sorted(name for name in names if not _stays(base, PurePosixPath(name), kept, present))
    manifests = [name for name in doomed if PurePosixPath(name).name == MANIFEST]
    others = [name for name in doomed if PurePosixPath(name).name != MANIFEST]
    with writing(root):
        if local_path(root) is None:
            filesystem, path = remote(root)
            for chosen in filter(None, (manifests, others)):
                filesystem.rm([join(path, name) for name in chosen])
        else:
            for name in (*manifests, *others):
                Path(base, name).unlink(missing_ok=True)
            _remove_empty_folders(base, kept, present)
    return [join(root, name) for name in doomed]


def _place(uri: str) -> PurePosixPath:
    """The one spelling of a URI by which it can be compared with others."""
    path = local_path(uri)
    if path is not None:
        return PurePosixPath(os.path.realpath(path))
    filesystem, name = remote(uri)
    return PurePosixPath(filesystem.unstrip_protocol(name))


def _stays(
    base: PurePosixPath, name: PurePosixPath, kept: set[PurePosixPath], present: Collection[PurePosixPath]
) -> bool:
    for depth, part in enumerate(name.parts):
        if temporary := TEMPORARY.fullmatch(part):
            target = base.joinpath(*name.parts[:depth], temporary["target"])
            return _is_kept(target, kept) and target not in present and target / MANIFEST not in present
    return _is_kept(base / name, kept)


def _is_kept(place: PurePosixPath, kept: set[PurePosixPath]) -> bool:
    return place in kept or any(parent in kept for parent in place.parents)


def _remove_empty_folders(base: PurePosixPath, kept: set[PurePosixPath], present: Collection[PurePosixPath]) -> None:
    to_kept = {parent for place in kept for parent in place.parents}
    for folder, _, _ in os.walk(base, topdown=False):
        place = PurePosixPath(folder)
        if place == base or place in to_kept or _stays(base, place.relative_to(base), kept, present):
            continue
        with suppress(OSError):  # It is not empty.
            Path(folder).rmdir()
