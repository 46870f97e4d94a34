"""Publishing to a store that is not a file system of this machine: upload the files, then create the manifest.

Several publishers may each upload a part of one folder. One of them creates the manifest of all parts.
"""

import filecmp
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhfless_functions.artifacts.copies import cache_folder, copied_digest, find_copy, keep_copy
from rlhfless_functions.artifacts.deltas import write_delta
from rlhfless_functions.artifacts.errors import writing
from rlhfless_functions.artifacts.fencing import is_refused
from rlhfless_functions.artifacts.files import create_exclusive, join, make_held_beside, remote, walk
from rlhfless_functions.artifacts.manifest import MANIFEST, WORKERS, Delta, Manifest, ManifestEntry, manifest

logger = logging.getLogger(__name__)

_DELTAS = ".delta"
"""Sub-folder of the deltas."""
_BLOCK = 4 * 2**20
"""Bytes of two files that are compared at a time."""


@dataclass(frozen=True)
class Upload:
    """A local folder whose files are uploaded: all files of a published folder, or a part of them."""

    folder: Path
    uri: str
    """The published folder."""
    since: str | None
    """Another published folder. The changes since then are uploaded too, if there is a copy of it here."""
    part: str
    """Name of this part among the parts of a folder; empty for a whole folder."""
    files: "_Files"

    @property
    def begun(self) -> bool:
        """Whether a file may be in the store already."""
        return self.files.begun

    def begin(self, name: str) -> None:
        """Begin to upload a file that is complete."""
        self.files.begin(name)

    def send(self) -> Manifest:
        """Upload the files; `complete` publishes them.

        Returns:
            The manifest's entries for them.

        Raises:
            ArtifactUnwritableError: if they cannot be written.
        """
        if self.since is None:
            return Manifest(self.files.all())
        with ThreadPoolExecutor(1) as beside:
            # They are made while the files are uploaded. The folder's reader waits for those anyway.
            changes = beside.submit(self._send_changes, self.since)
            return Manifest(self.files.all(), changes.result())

    def keep(self, published: Manifest) -> None:
        """Keep the folder as a copy, from which the next version's deltas are made. A failure is only logged.

        Args:
            published: the manifest that was created.
        """
        if self.since is None:
            return
        try:
            keep_copy(self.folder, self.uri, published, self.part)
        except OSError as error:
            logger.warning("no copy of %s is kept, and the next version is published in full: %s", self.uri, error)

    def _send_changes(self, since: str) -> Delta | None:
        """Upload deltas. If they can't be made, return None, and the folder is published without them."""
        try:
            base = find_copy(since, self.part)
            if base is None:
                return None
            with tempfile.TemporaryDirectory(prefix="rlhfless-delta-") as scratch:
                for name in walk(str(self.folder)):
                    old, new, delta = base / name, self.folder / name, Path(scratch, _DELTAS, name)
                    if not old.is_file() or filecmp.cmp(old, new, shallow=False):
                        continue
                    delta.parent.mkdir(parents=True, exist_ok=True)
                    if not write_delta(old, new, delta):
                        delta.unlink(missing_ok=True)
                with _uploaded(Path(scratch), self.uri) as deltas:
                    uploaded = deltas.all()
        except OSError as error:
            logger.warning("%s is published without what changed since %s: %s", self.uri, since, error)
            return None
        files = {
            name.removeprefix(f"{_DELTAS}/"): replace(entry, stored=entry.stored or name)
            for name, entry in uploaded.items()
        }
        return Delta(copied_digest(base), files) if files else None


@contextmanager
def uploading(uri: str, *, since: str | None = None, part: str = "") -> Iterator[Upload]:
    """Give a local folder for files to upload. It is removed at the end of the block, unless it is kept as a copy.

    Args:
        uri: the folder to publish, in a store that is not a file system of this machine.
        since: see `Upload.since`; without effect if no copies can be kept.
        part: see `Upload.part`.

    Raises:
        ArtifactUnwritableError: if there is no room for the folder.
    """
    copies = _copies(uri) if since is not None else None
    with ExitStack() as cleaning:
        with writing(uri):
            if copies is None:
                folder = Path(tempfile.mkdtemp(prefix="rlhfless-publish-"))
            else:
                folder, holding = make_held_beside(copies / "publication")
                cleaning.callback(os.close, holding)
        cleaning.callback(shutil.rmtree, folder, ignore_errors=True)
        files = cleaning.enter_context(_uploaded(folder, uri))
        yield Upload(folder, uri, since if copies is not None else None, part, files)


def complete(uri: str, files: Manifest) -> bool:
    """Publish uploaded files. If something has been published before, it stays, and the uploaded files are removed that
    it does not name.

    Returns:
        Whether these files are the published ones.

    Raises:
        ArtifactUnwritableError: if the manifest cannot be written.
    """
    filesystem, base = remote(uri)
    with writing(uri):
        if create_exclusive(join(uri, MANIFEST), files.dump()):
            return True
        published = manifest(uri)
        if doomed := _stored(files) - (_stored(published) if published is not None else set()):
            filesystem.rm([join(base, name) for name in sorted(doomed)])
        return False


def _stored(files: Manifest) -> set[str]:
    """Return the places of the files and deltas that a manifest names, relative to the folder."""
    named = [*files.files.items(), *(files.delta.files.items() if files.delta is not None else ())]
    return {entry.stored or name for name, entry in named}


def combine(parts: Sequence[Manifest]) -> Manifest:
    """Return the manifest of all parts of a folder. If a part lacks deltas, its files are fetched whole.

    Raises:
        ValueError: if the deltas of two parts have different bases.
    """
    deltas = [part.delta for part in parts if part.delta is not None]
    if len({delta.base for delta in deltas}) > 1:
        raise ValueError("the parts of one folder were made against different versions")
    files = {name: entry for part in parts for name, entry in part.files.items()}
    changes = {name: entry for delta in deltas for name, entry in delta.files.items()}
    return Manifest(files, Delta(deltas[0].base, changes) if deltas else None)


def _copies(uri: str) -> Path | None:
    """Return the folder of copies; None, after a warning, if it can't be written."""
    try:
        folder = cache_folder()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder}: user {os.geteuid()} may not write to it")
    except OSError as error:
        logger.warning("%s is published without what changed, as no copy of it can be kept: %s", uri, error)
        return None
    return folder


class _Files:
    """Uploads the files of a local folder, and computes their entries."""

    def __init__(self, folder: Path, uri: str, pool: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._uri = uri
        self._filesystem, self._base = remote(uri)
        self._pool = pool
        self._spare = f".{uuid.uuid4().hex}"
        self._begun: dict[str, Future[ManifestEntry]] = {}

    @property
    def begun(self) -> bool:
        """Whether an upload has begun."""
        return bool(self._begun)

    def begin(self, name: str) -> None:
        """Begin with a file that is complete."""
        self._begun[name] = self._pool.submit(self._send, name)

    def all(self) -> dict[str, ManifestEntry]:
        """Return the entries of all files of the folder, once they are uploaded.

        Raises:
            ArtifactUnwritableError: if they cannot be written.
        """
        names = walk(str(self._folder))
        for name in names:
            if name not in self._begun:
                self.begin(name)
        with writing(self._uri):
            return {name: self._begun[name].result() for name in names}

    def _send(self, name: str) -> ManifestEntry:
        """Upload one file under its own name, or under a spare one if another file has that."""
        file = self._folder / name
        entry = ManifestEntry.of(file)
        for stored in (name, f"{self._spare}/{name}"):
            if _create(self._filesystem, file, join(self._base, stored)):
                return replace(entry, stored=stored if stored != name else None)
        raise FileExistsError(f"{join(self._uri, self._spare)} exists")


@contextmanager
def _uploaded(folder: Path, uri: str) -> Iterator[_Files]:
    pool = ThreadPoolExecutor(WORKERS)
    try:
        yield _Files(folder, uri, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _create(filesystem: Any, file: Path, place: str) -> bool:
    """Upload a file unless its place is taken. Return whether the place has the file's content.

    The file may be there because the answer of an earlier try was lost, or because another publisher has the same.
    """
    try:
        filesystem.put_file(str(file), place, mode="create")
    except OSError as error:
        if not (is_refused(error) and filesystem.exists(place)):
            raise
        return _holds(filesystem, place, file)
    return True


def _holds(filesystem: Any, place: str, file: Path) -> bool:
    """Return whether a stored file has the content of a local one."""
    if filesystem.size(place) != file.stat().st_size:
        return False
    with filesystem.open(place, "rb") as stored, file.open("rb") as local:
        while (block := local.read(_BLOCK)) == stored.read(_BLOCK):
            if not block:
                return True
    return False
