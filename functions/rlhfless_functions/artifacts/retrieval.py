"""Getting a published folder onto the local disk, checked."""

import hashlib
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlhfless_functions.artifacts.errors import (
    ArtifactCorruptError,
    ArtifactMissingError,
    missing_bucket,
    no_space,
    reading,
    unwritable,
    writing,
)
from rlhfless_functions.artifacts.files import TEMPORARY, beside, exists, join, local_path, remote, walk
from rlhfless_functions.artifacts.manifest import (
    WORKERS,
    Manifest,
    damaged,
    manifest,
    remedy,
)

_CACHED_FOLDERS = 4
_IN_USE_SECONDS = 600.0


def local_folder(uri: str, *, verify: bool = True, published: bool = True) -> Path:
    """A published folder on the local disk: itself where it is local, else a copy, which is kept for the next time.

    Copies are kept below `$RLHFLESS_CACHE`, or in the system's folder for temporary files; the last four, and those
    used in the last ten minutes, stay. A copy's checksums are taken when it is made.

    Args:
        uri: the folder.
        verify: compare a local folder's sizes and checksums with its manifest, too.
        published: if False, a folder without a manifest, such as a model of the user's own, is taken as it is.

    Raises:
        ArtifactMissingError: if it does not exist or has not been published.
        ArtifactCorruptError: if a file is missing, or is not what was published.
        ArtifactUnwritableError: if the copy cannot be written.
    """
    found = manifest(uri)
    if found is None and (published or not exists(uri)):
        state = "has no manifest: its publication was never finished" if exists(uri) else "does not exist"
        remedy = missing_bucket(uri) or "check the URI, or run the stage that publishes it again"
        raise ArtifactMissingError(f"{uri} {state}; {remedy}")
    path = local_path(uri)
    if path is None:
        return _cached(uri, found)
    if found is not None and verify:
        _check(uri, path, found)
    return path


def _check(uri: str, folder: Path, found: Manifest) -> None:
    for name, entry in found.files.items():
        path = folder / name
        if not path.is_file():
            raise _lost(uri, join(uri, name))
        if path.stat().st_size != entry.size:
            raise ArtifactCorruptError(
                f"{join(uri, name)} has {path.stat().st_size} bytes, the manifest says {entry.size}: {remedy(uri)}"
            )
    with reading(uri):
        bad = damaged(folder, found.files)
    if bad:
        raise _corrupt(uri, join(uri, bad[0]))


def _corrupt(uri: str, file: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(f"{file} is corrupt (its checksum is not the manifest's): {remedy(uri)}")


def _lost(uri: str, file: str) -> ArtifactCorruptError:
    return ArtifactCorruptError(f"{file} is missing though the manifest names it: {remedy(uri)}")


def _cached(uri: str, found: Manifest | None) -> Path:
    with reading(uri):
        identity = found.dump() if found else repr(_listing(uri)).encode()
    names = {name: entry.stored or name for name, entry in found.files.items()} if found else {n: n for n in walk(uri)}
    cache = Path(os.environ.get("RLHFLESS_CACHE") or Path(tempfile.gettempdir()) / f"rlhfless-cache-{os.getuid()}")
    place = cache / hashlib.sha256(uri.encode() + b"\0" + identity).hexdigest()
    if not place.is_dir():
        with writing(str(cache)):
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            _forget_old(cache)
        _download(uri, found, names, place)
    with writing(str(place)):
        os.utime(place)
    return place


def _listing(uri: str) -> list[tuple[str, object, object]]:
    """What tells one state of a folder without a manifest from another."""
    filesystem, base = remote(uri)
    return [
        (name, info.get("size"), info.get("ETag") or info.get("mtime") or info.get("created"))
        for name, info in sorted(filesystem.find(base, detail=True).items())
    ]


def _download(uri: str, found: Manifest | None, names: dict[str, str], place: Path) -> None:
    filesystem, base = remote(uri)
    folder = beside(place)

    def fetch(name: str, stored: str) -> None:
        source, copy = join(uri, stored), folder / name
        with writing(str(copy)):
            copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            with reading(source):
                filesystem.get_file(join(base, stored), str(copy))
        except ArtifactMissingError as error:
            if isinstance(error.__cause__, OSError) and no_space(error.__cause__):
                raise unwritable(str(copy), error.__cause__) from error
            if found is not None and isinstance(error.__cause__, FileNotFoundError):
                raise _lost(uri, source) from error
            raise
        if found is not None and not found.files[name].describes(copy):
            raise _corrupt(uri, source)

    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            for done in [pool.submit(fetch, name, stored) for name, stored in names.items()]:
                done.result()
        with writing(str(place)):
            _settle(folder, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settle(folder: Path, place: Path) -> None:
    folder.mkdir(exist_ok=True)
    try:
        folder.rename(place)
    except OSError:
        # Another process has made the same copy meanwhile.
        if not place.is_dir():
            raise


def _forget_old(cache: Path) -> None:
    """Remove copies that are neither among the last few nor recently used, and downloads that were broken off."""
    now = time.time()
    newest_first = sorted(((path.stat().st_mtime, path) for path in cache.iterdir() if path.is_dir()), reverse=True)
    copies = [(used, path) for used, path in newest_first if not TEMPORARY.fullmatch(path.name)]
    broken_off = [(used, path) for used, path in newest_first if TEMPORARY.fullmatch(path.name)]
    for used, path in [*copies[_CACHED_FOLDERS - 1 :], *broken_off]:
        if now - used > _IN_USE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
