"""Local copies of content from a store that is not a file system of this machine.

They are kept below `$RLHFLESS_CACHE`, or in the system's folder for temporary files. The four that were used last stay,
and so do all that were used in the last ten minutes. The name of a copy is a digest of its source. It exists whole or
not at all.
"""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from rlhfless_functions.artifacts.errors import ArtifactUnwritableError, writing
from rlhfless_functions.artifacts.files import TEMPORARY, is_held, local_path
from rlhfless_functions.artifacts.manifest import Manifest, manifest

_CACHED_FOLDERS = 4
_IN_USE_SECONDS = 600.0
_PART = ".part-"


def cache_folder() -> Path:
    """Return the folder of the copies; create it if it is missing.

    Everybody may write into the system's folder for temporary files, so the folder there must be this user's own.

    Raises:
        ArtifactUnwritableError: if it can't be created, or if another user could put copies into it.
    """
    chosen = os.environ.get("RLHFLESS_CACHE")
    cache = Path(chosen or Path(tempfile.gettempdir()) / f"rlhfless-cache-{os.getuid()}")
    with writing(str(cache)):
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not chosen and not _is_private(cache):
            raise ArtifactUnwritableError(
                f"{cache} is a link, or others may write to it: remove it, or set RLHFLESS_CACHE to a folder of yours"
            )
    return cache


def _is_private(folder: Path) -> bool:
    """Return whether this is a real folder that this user made and nobody else may write to."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def copy_place(uri: str, identity: bytes) -> Path:
    """Return the place of a folder's copy, whether or not it exists.

    Args:
        uri: the folder.
        identity: identifies the content: the manifest, if there is one.

    Raises:
        ArtifactUnwritableError: if there can be no copies.
    """
    return cache_folder() / hashlib.sha256(uri.encode() + b"\0" + identity).hexdigest()


def find_copy(uri: str, part: str = "") -> Path | None:
    """Return the copy of a published folder; None if there is none here, nothing is published, or it needs no copy.

    Args:
        uri: the folder.
        part: name of a part, to find the copy of that part.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
        ArtifactCorruptError: if the manifest is unreadable.
    """
    found = manifest(uri) if local_path(uri) is None else None
    place = _part_of(copy_place(uri, found.dump()), part) if found is not None else None
    return place if place is not None and place.is_dir() else None


def copied_digest(copy: Path) -> str:
    """Return the digest of the published folder that this is a copy of, whole or in part."""
    return copy.name.partition(_PART)[0]


def keep_copy(folder: Path, uri: str, published: Manifest, part: str = "") -> None:
    """Keep a folder that has been published, as a copy of the published one.

    Args:
        folder: a folder on the file system of the copies. It is moved.
        uri: its published place.
        published: its manifest.
        part: name of the copy if the folder has only some of the files. Readers never take it for the whole.

    Raises:
        ArtifactUnwritableError: if that cannot be done.
    """
    place = _part_of(copy_place(uri, published.dump()), part)
    with writing(str(place)):
        forget_old_copies()
        settle(folder, place)


def _part_of(place: Path, part: str) -> Path:
    return place.with_name(f"{place.name}{_PART}{part}") if part else place


def settle(folder: Path, place: Path) -> None:
    """Give a finished copy its name. Do nothing if another process has made the same copy meanwhile.

    Raises:
        OSError: if the file system refuses it.
    """
    folder.mkdir(exist_ok=True)
    try:
        folder.rename(place)
    except OSError:
        if not place.is_dir():
            raise
    os.utime(place)


def forget_old_copies() -> None:
    """Remove copies that are neither among the last used nor recently used, and unfinished copies.

    Raises:
        ArtifactUnwritableError: if there can be no copies.
    """
    now = time.time()
    folders = (path for path in cache_folder().iterdir() if path.is_dir())
    newest_first = sorted(((path.stat().st_mtime, path) for path in folders), reverse=True)
    copies = [(used, path) for used, path in newest_first if not TEMPORARY.fullmatch(path.name)]
    broken_off = [(used, path) for used, path in newest_first if TEMPORARY.fullmatch(path.name)]
    for used, path in [*copies[_CACHED_FOLDERS - 1 :], *broken_off]:
        if now - used > _IN_USE_SECONDS and not is_held(path):
            shutil.rmtree(path, ignore_errors=True)
