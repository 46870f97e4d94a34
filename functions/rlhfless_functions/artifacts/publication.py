"""Publishing a folder: whole or not at all.

On this machine's file system the folder is written beside its place and renamed. In any other store no object is ever
overwritten, and two publishers of one URI cannot mix their files: the one that creates the manifest has published, and
the other's work is dropped.
"""

import filecmp
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rlhfless_functions.artifacts.copies import cache_folder, find_copy, keep_copy
from rlhfless_functions.artifacts.deltas import write_delta
from rlhfless_functions.artifacts.errors import no_space, unwritable, writing
from rlhfless_functions.artifacts.files import create_exclusive, join, local_path, make_held_beside, remote, walk
from rlhfless_functions.artifacts.manifest import (
    MANIFEST,
    WORKERS,
    Delta,
    Manifest,
    ManifestEntry,
    entries,
    is_published,
)

logger = logging.getLogger(__name__)

_DELTAS = ".delta"
"""Sub-folder with what changed."""

# Files that are flushed together share one commit of the file system's journal: three times faster than in a row.
_FLUSHES = 8


@contextmanager
def publish(uri: str, *, since: str | None = None) -> Iterator[Path]:
    """Give a local folder to write into; on leaving, its files are published at `uri`.

    After an exception nothing is published. Where something has been published before, it stands, and the new files
    are dropped: a published folder is immutable.

    Args:
        uri: the folder.
        since: another published folder that readers of this one are likely to have, such as the version before. In a
            store that is no file system of this machine, what changed since then is published, too, where this machine
            has a copy of it, and a copy of the new folder is kept here.

    Raises:
        ArtifactUnwritableError: if `uri` cannot be written; nothing is published.
    """
    target = local_path(uri)
    with ExitStack() as cleaning:
        copies = _copies(uri) if target is None and since is not None else None
        with writing(uri):
            place = target if copies is None else copies / "publication"
            if place is None:
                folder = Path(tempfile.mkdtemp(prefix="rlhfless-publish-"))
            else:
                folder, holding = make_held_beside(place)
                cleaning.callback(os.close, holding)
        cleaning.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            yield folder
        except OSError as error:
            if no_space(error):
                raise unwritable(uri, error) from error
            raise
        with writing(uri):
            if is_published(uri):
                return
            if target is None:
                _send(folder, uri, since if copies is not None else None)
            else:
                _move(folder, target)


def _copies(uri: str) -> Path | None:
    """Where copies are; None where they can't be written."""
    try:
        folder = cache_folder()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder}: user {os.geteuid()} may not write to it")
    except OSError as error:
        logger.warning("%s is published without what changed, as no copy of it can be kept: %s", uri, error)
        return None
    return folder


def _send(folder: Path, uri: str, since: str | None) -> None:
    if since is None:
        complete(uri, upload(folder, uri))
        return
    with ThreadPoolExecutor(1) as beside:
        # Made while the files are on their way: the folder is read only once they are there.
        changes = beside.submit(_upload_delta, folder, uri, since)
        published = Manifest(upload(folder, uri), changes.result())
    if complete(uri, published.files, published.delta):
        try:
            keep_copy(folder, uri, published)
        except OSError as error:
            logger.warning("no copy of %s is kept, and the next version is published in full: %s", uri, error)


def _upload_delta(folder: Path, uri: str, since: str) -> Delta | None:
    """Publishing continues without it if it can't be made."""
    try:
        base = find_copy(since)
        if base is None:
            return None
        with tempfile.TemporaryDirectory(prefix="rlhfless-delta-") as scratch:
            for name in walk(str(folder)):
                old, new, delta = base / name, folder / name, Path(scratch, _DELTAS, name)
                if not old.is_file() or filecmp.cmp(old, new, shallow=False):
                    continue
                delta.parent.mkdir(parents=True, exist_ok=True)
                if not write_delta(old, new, delta):
                    delta.unlink(missing_ok=True)
            uploaded = upload(Path(scratch), uri)
    except OSError as error:
        logger.warning("%s is published without what changed since %s: %s", uri, since, error)
        return None
    files = {
        name.removeprefix(f"{_DELTAS}/"): replace(entry, stored=entry.stored or name)
        for name, entry in uploaded.items()
    }
    return Delta(base.name, files) if files else None


def _move(folder: Path, target: Path) -> None:
    names = walk(str(folder))
    (folder / MANIFEST).write_bytes(Manifest(entries(folder, names)).dump())
    with ThreadPoolExecutor(_FLUSHES) as pool:
        list(pool.map(lambda name: _flush(folder / name), [*names, MANIFEST]))
    try:
        folder.rename(target)
    except OSError:
        if is_published(str(target)):
            return
        if not target.is_dir():
            raise
        # The folder has files of someone else's: ours join them, the manifest last.
        for name in [*names, MANIFEST]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).replace(target / name)
    _flush(target.parent)


def _flush(path: Path) -> None:
    """Make a file's content, or a folder's names, outlast a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def upload(folder: Path, uri: str) -> dict[str, ManifestEntry]:
    """Upload the files of a folder to a store that is no file system of this machine; `complete` publishes them.

    Raises:
        ArtifactUnwritableError: if they cannot be written.
    """
    filesystem, base = remote(uri)
    spare = f".{uuid.uuid4().hex}"

    def put(name: str) -> str:
        """Upload one file under its own name, or under a spare one if that is taken; return which."""
        for stored in (name, f"{spare}/{name}"):
            try:
                filesystem.put_file(str(folder / name), join(base, stored), mode="create")
            except FileExistsError:
                continue
            return stored
        raise FileExistsError(f"{join(uri, spare)} exists")

    names = walk(str(folder))
    with writing(uri), ThreadPoolExecutor(WORKERS) as pool:
        uploads = {name: pool.submit(put, name) for name in names}
        content = entries(folder, names)
        stored = {name: upload.result() for name, upload in uploads.items()}
    return {
        name: replace(entry, stored=stored[name] if stored[name] != name else None) for name, entry in content.items()
    }


def complete(uri: str, files: Mapping[str, ManifestEntry], delta: Delta | None = None) -> bool:
    """Publish files that have been uploaded; where something has been published before, it stands and they are removed.

    Returns:
        Whether it is these files that are published.

    Raises:
        ArtifactUnwritableError: if the manifest cannot be written.
    """
    filesystem, base = remote(uri)
    with writing(uri):
        if create_exclusive(join(uri, MANIFEST), Manifest(dict(files), delta).dump()):
            return True
        stored = [*files.items(), *(delta.files.items() if delta is not None else ())]
        filesystem.rm([join(base, entry.stored or name) for name, entry in stored])
        return False
