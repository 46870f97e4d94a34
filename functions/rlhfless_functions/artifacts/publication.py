"""Publishing a folder: whole or not at all.

On this machine's file system the folder is written beside its place and renamed. In any other store no object is ever
overwritten, and two publishers of one URI cannot mix their files: the one that creates the manifest has published, and
the other's work is dropped (`uploads`).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlhfless_functions.artifacts.errors import no_space, unwritable, writing
from rlhfless_functions.artifacts.files import local_path, make_held_beside, walk
from rlhfless_functions.artifacts.manifest import MANIFEST, Manifest, ManifestEntry, is_published
from rlhfless_functions.artifacts.uploads import complete, uploading

# Files that are flushed together share one commit of the file system's journal: three times faster than in a row.
_FLUSHES = 8


@dataclass(frozen=True)
class Publication:
    """A folder that is being published."""

    folder: Path
    """The local folder to write into."""
    finish: Callable[[str], None]
    """Call it with the name of a file that is complete. The file is flushed or uploaded while others are written.
    The rest is at the end."""


@contextmanager
def publish(uri: str, *, since: str | None = None) -> Iterator[Path]:
    """Do the same as `publishing`, for files that are small or few."""
    with publishing(uri, since=since) as publication:
        yield publication.folder


@contextmanager
def publishing(uri: str, *, since: str | None = None) -> Iterator[Publication]:
    """Give a local folder to write into, and publish its files at `uri` at the end of the block.

    After an exception nothing is published. If `uri` has been published before, it stays as it is and the new files are
    dropped, because a published folder is immutable.

    Args:
        uri: the folder.
        since: another published folder that readers of this one are likely to have, such as the version before. In a
            store that is not a file system of this machine, the changes since then are published too, if this machine
            has a copy of it. A copy of the new folder is then kept here.

    Raises:
        ArtifactUnwritableError: if `uri` cannot be written; nothing is published.
    """
    target = local_path(uri)
    with ExitStack() as cleaning:
        if target is None:
            upload = cleaning.enter_context(uploading(uri, since=since))
            publication = Publication(upload.folder, _unless_published(uri, upload.begin))
        else:
            with writing(uri):
                folder, holding = make_held_beside(target)
            cleaning.callback(os.close, holding)
            cleaning.callback(shutil.rmtree, folder, ignore_errors=True)
            files = cleaning.enter_context(_flushing(folder))
            publication = Publication(folder, files.begin)
        try:
            yield publication
        except OSError as error:
            if no_space(error):
                raise unwritable(uri, error) from error
            raise
        with writing(uri):
            if target is not None:
                if not is_published(uri):
                    _move(files, target)
            # What has been uploaded beside another publisher's folder is removed by `complete`.
            elif (upload.begun or not is_published(uri)) and complete(uri, published := upload.send()):
                upload.keep(published)


def _unless_published(uri: str, begin: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that begins with a file unless the folder had been published before the first."""
    published_before = cache(lambda: is_published(uri))
    return lambda name: None if published_before() else begin(name)


class _Flushing:
    """Flushes the files of a local folder, and computes their entries."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.folder = folder
        self._pool = pool
        self._readers = folder.stat().st_mode & 0o444
        self._begun: dict[str, Future[ManifestEntry]] = {}

    def begin(self, name: str) -> None:
        """Begin with a file that is complete."""
        self._begun[name] = self._pool.submit(self._flush, self.folder / name)

    def all(self) -> dict[str, ManifestEntry]:
        """Return the entries of all files of the folder, once they are flushed."""
        names = walk(str(self.folder))
        for name in names:
            if name not in self._begun:
                self.begin(name)
        return {name: self._begun[name].result() for name in names}

    def _flush(self, path: Path) -> ManifestEntry:
        mode = path.stat().st_mode
        # Those who may read the folder may read its files: safetensors lets their owner alone.
        if mode | self._readers != mode:
            path.chmod(mode | self._readers)
        # It reads what is still in memory.
        entry = ManifestEntry.of(path)
        flush(path)
        return entry


@contextmanager
def _flushing(folder: Path) -> Iterator[_Flushing]:
    pool = ThreadPoolExecutor(_FLUSHES)
    try:
        yield _Flushing(folder, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _move(files: _Flushing, target: Path) -> None:
    folder, content = files.folder, files.all()
    (folder / MANIFEST).write_bytes(Manifest(content).dump())
    flush(folder / MANIFEST)
    try:
        folder.rename(target)
    except OSError:
        if is_published(str(target)):
            return
        if not target.is_dir():
            raise
        # The folder has another publisher's files. Ours join them, the manifest last.
        for name in [*content, MANIFEST]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).replace(target / name)
    flush(target.parent)


def flush(path: Path) -> None:
    """Make a file's content, or a folder's names, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
