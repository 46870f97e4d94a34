"""Publishing a folder: whole or not at all.

On this machine's file system the folder is written beside its place and renamed. In any other store no object is ever
overwritten, and two publishers of one URI cannot mix their files: the one that creates the manifest has published, and
the other's work is dropped (`uploads`).
"""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rlhfless_functions.artifacts.errors import no_space, unwritable, writing
from rlhfless_functions.artifacts.files import local_path, make_held_beside, walk
from rlhfless_functions.artifacts.manifest import MANIFEST, Manifest, entries, is_published
from rlhfless_functions.artifacts.uploads import complete, uploading

# Files that are flushed together share one commit of the file system's journal: three times faster than in a row.
_FLUSHES = 8


@contextmanager
def publish(uri: str, *, since: str | None = None) -> Iterator[Path]:
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
            folder = upload.folder
        else:
            with writing(uri):
                folder, holding = make_held_beside(target)
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
            if target is not None:
                _move(folder, target)
            elif complete(uri, published := upload.send()):
                upload.keep(published)


def _move(folder: Path, target: Path) -> None:
    names = walk(str(folder))
    _as_umask_allows(folder, names)
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
        # The folder has another publisher's files. Ours join them, the manifest last.
        for name in [*names, MANIFEST]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).replace(target / name)
    _flush(target.parent)


def _as_umask_allows(folder: Path, names: list[str]) -> None:
    """Let those read the files who may read the folder: safetensors lets their owner alone."""
    readers = folder.stat().st_mode & 0o444
    for name in names:
        mode = (folder / name).stat().st_mode
        if mode | readers != mode:
            (folder / name).chmod(mode | readers)


def _flush(path: Path) -> None:
    """Make a file's content, or a folder's names, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
