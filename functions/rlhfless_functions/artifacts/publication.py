"""Publishing a folder: whole or not at all.

On this machine's file system the folder is written beside its place and renamed. In any other store no object is ever
overwritten, so that two publishers of one URI cannot mix their files: whoever creates the manifest has published, and
the other's work is dropped.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rlhfless_functions.artifacts.errors import no_space, unwritable, writing
from rlhfless_functions.artifacts.files import create_exclusive, join, local_path, make_held_beside, remote, walk
from rlhfless_functions.artifacts.manifest import MANIFEST, WORKERS, Manifest, ManifestEntry, entries, is_published

# Files that are flushed together share one commit of the file system's journal: three times faster than in a row.
_FLUSHES = 8


@contextmanager
def publish(uri: str) -> Iterator[Path]:
    """Give a local folder to write into; on leaving, its files are published at `uri`.

    After an exception nothing is published. Where something has been published before, it stands, and the new files
    are dropped: a published folder is immutable.

    Raises:
        ArtifactUnwritableError: if `uri` cannot be written; nothing is published.
    """
    target = local_path(uri)
    with ExitStack() as cleaning:
        with writing(uri):
            if target is None:
                folder = Path(tempfile.mkdtemp(prefix="rlhfless-publish-"))
            else:
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
            if target is None:
                complete(uri, upload(folder, uri))
            else:
                _move(folder, target)


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


def complete(uri: str, files: Mapping[str, ManifestEntry]) -> None:
    """Publish files that have been uploaded; where something has been published before, it stands and they are removed.

    Raises:
        ArtifactUnwritableError: if the manifest cannot be written.
    """
    filesystem, base = remote(uri)
    with writing(uri):
        if not create_exclusive(join(uri, MANIFEST), Manifest(dict(files)).dump()):
            filesystem.rm([join(base, entry.stored or name) for name, entry in files.items()])
