"""Getting a published folder onto the local disk, checked."""

import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rlhfless_functions.artifacts.arriving import Arriving
from rlhfless_functions.artifacts.copies import cache_folder, copy_place, forget_old_copies, settle
from rlhfless_functions.artifacts.counting import count
from rlhfless_functions.artifacts.deltas import apply_delta
from rlhfless_functions.artifacts.errors import (
    ArtifactCorruptError,
    ArtifactMissingError,
    missing_bucket,
    no_space,
    reading,
    unwritable,
    writing,
)
from rlhfless_functions.artifacts.files import exists, join, local_path, make_held_beside, remote, walk
from rlhfless_functions.artifacts.manifest import WORKERS, Manifest, ManifestEntry, damaged, manifest, remedy
from rlhfless_functions.artifacts.peers import Peer, Sources
from rlhfless_functions.artifacts.relaying import relay

_RANGE = 4 * 2**20
"""Bytes of a first request. On a slow link the beginning of a file arrives soon."""
_MOST_RANGE = 32 * 2**20
_RANGES_AHEAD = 4
_MOST_RANGES_AHEAD = 8
_QUICK_SECONDS = 0.25
"""If a range takes no longer than this, larger and more ranges are requested at a time. On a fast link most of the time
would otherwise go into requests."""

logger = logging.getLogger(__name__)


_making: WeakValueDictionary[Path, threading.Lock] = WeakValueDictionary()
"""A lock for each copy, held by the thread that makes it. Other threads of this process wait, and then find the
copy."""
_under_way: WeakValueDictionary[str, Arriving] = WeakValueDictionary()
"""Folders being fetched, by URI."""
_beginning = threading.Lock()
"""Lock of the two above."""


def arrive(uri: str, *, sources: Sources | None = None) -> Arriving:
    """Begin to fetch a folder, published or a user's own, from a store that is not a file system of this machine.

    If this process already fetches the folder, return that fetch.

    Args:
        sources: see `local_folder`.
    """
    with _beginning:
        under_way = _under_way.get(uri)
        if under_way is None or under_way.ended:
            _under_way[uri] = under_way = Arriving(
                lambda arriving: local_folder(uri, published=False, sources=sources, arriving=arriving)
            )
        return under_way


def local_folder(
    uri: str,
    *,
    verify: bool = True,
    published: bool = True,
    sources: Sources | None = None,
    arriving: Arriving | None = None,
) -> Path:
    """Return a published folder on the local disk: the folder itself if it is local, otherwise a copy, which is kept
    for the next time.

    `copies` says where, and for how long. A copy's checksums are verified when it is made. If this folder was published
    with the changes since another one, and there is a copy of that, only the changes are fetched.

    Args:
        uri: the folder.
        verify: whether to compare a local folder, too, with its manifest.
        published: whether the folder must have a manifest. Otherwise a folder without one, such as the user's own
            model, is used as it is.
        sources: other instances from which to fetch a published folder, before the store is read; see `peers`. Unless
            it is None, this process passes the folder on.
        arriving: is told of the progress of a published folder's files.

    Raises:
        ArtifactMissingError: if it does not exist or has not been published.
        ArtifactCorruptError: if a file is missing, or differs from the published one.
        ArtifactUnwritableError: if the copy cannot be written.
    """
    found = manifest(uri)
    if found is None and (published or not exists(uri)):
        state = "has no manifest: its publication was never finished" if exists(uri) else "does not exist"
        remedy = missing_bucket(uri) or "check the URI, or run the stage that publishes it again"
        raise ArtifactMissingError(f"{uri} {state}; {remedy}")
    path = local_path(uri)
    if path is None:
        return _cached(uri, found, sources if found is not None else None, arriving)
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


def _cached(uri: str, found: Manifest | None, sources: Sources | None, arriving: Arriving | None) -> Path:
    with reading(uri):
        identity = found.dump() if found else repr(_listing(uri)).encode()
    place = copy_place(uri, identity)
    with _beginning:
        under_way = _under_way.get(uri) if arriving is None else None
    if under_way is not None and not under_way.ended:
        # It may come from instances that this caller does not know. If that fails, the caller tries itself.
        with suppress(Exception):
            if under_way.result() == place:
                return place
    with _beginning:
        alone = _making.setdefault(place, threading.Lock())
    with alone:
        _make_copy(uri, found, place, sources, arriving)
    if found is not None and sources is not None:
        relay(place.name, found.files, place)
    with writing(str(place)):
        os.utime(place)
    return place


def _make_copy(
    uri: str, found: Manifest | None, place: Path, sources: Sources | None, arriving: Arriving | None
) -> None:
    if place.is_dir():
        if arriving is not None:
            arriving.begins(place, found.files if found is not None else (), all_there=True)
    else:
        with writing(str(cache_folder())):
            forget_old_copies()
            folder, holding = make_held_beside(place)
        if arriving is not None and found is not None:
            arriving.begins(folder, found.files)
        try:
            if found is not None and sources is not None:
                with _relaying(place, found, folder):
                    _fetch_published(uri, found, folder, Peer(sources, place.name), arriving)
            elif found is not None:
                _fetch_published(uri, found, folder, arriving=arriving)
            else:
                _fetch_files(uri, {name: name for name in walk(uri)}, folder)
            with writing(str(place)):
                settle(folder, place)
            if arriving is not None:
                arriving.moved(place)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(holding)


@contextmanager
def _relaying(place: Path, found: Manifest, folder: Path) -> Iterator[None]:
    """Pass a copy on while it is made. If that fails, its readers lose it."""
    relayed = relay(place.name, found.files, folder)
    try:
        yield
    except BaseException:
        relayed.given_up = True
        raise
    # It gets its name next. Readers with an open file continue.
    relayed.folder = place


def _listing(uri: str) -> list[tuple[str, object, object]]:
    """Return data that differ between states of a folder without a manifest."""
    filesystem, base = remote(uri)
    return [
        (name, info.get("size"), info.get("ETag") or info.get("mtime") or info.get("created"))
        for name, info in sorted(filesystem.find(base, detail=True).items())
    ]


def _fetch_published(
    uri: str, found: Manifest, folder: Path, peer: Peer | None = None, arriving: Arriving | None = None
) -> None:
    base = cache_folder() / found.delta.base if found.delta is not None else None
    made = _make_of(base, uri, found, folder) if base is not None and base.is_dir() else set()
    if arriving is not None:
        for name in made:
            arriving.completed(name)
    names = {name: entry.stored or name for name, entry in found.files.items() if name not in made}
    _fetch_files(uri, names, folder, found.files, peer, arriving)
    if peer is not None:
        count(refused_sources=peer.refused)


def _make_of(base: Path, uri: str, found: Manifest, folder: Path) -> set[str]:
    """Make the files of a copy that another copy and deltas give, and return their names."""
    assert found.delta is not None
    deltas = found.delta.files
    made = set()
    for name, entry in found.files.items():
        old, copy = base / name, folder / name
        try:
            if name in deltas:
                count(bytes=deltas[name].size)
                _apply(old, uri, deltas[name], copy)
                if not entry.describes(copy):
                    raise ValueError(f"it does not make the file that was published of {old}")
                count(deltas=1)
            elif old.is_file() and old.stat().st_size == entry.size and entry.describes(old):
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(old, copy)
            else:
                continue
        except (OSError, ValueError, ImportError) as error:
            logger.warning(
                "what changed in %s since the version before is of no use here, and it is fetched whole: %s",
                join(uri, name),
                error,
            )
            count(refused_deltas=1)
            continue
        made.add(name)
    return made


def _apply(old: Path, uri: str, delta: ManifestEntry, copy: Path) -> None:
    filesystem, root = remote(uri)
    stored = delta.stored or copy.name
    source, part = join(uri, stored), copy.with_name(f"{copy.name}.delta")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with reading(source):
            filesystem.get_file(join(root, stored), str(part))
        if not delta.describes(part):
            raise ValueError(f"{source} is damaged: its checksum is not the manifest's")
        apply_delta(old, part, copy)
    finally:
        part.unlink(missing_ok=True)


def _fetch_files(
    uri: str,
    names: dict[str, str],
    folder: Path,
    found: dict[str, ManifestEntry] | None = None,
    peer: Peer | None = None,
    arriving: Arriving | None = None,
) -> None:
    """Fetch whole files. If there is a manifest, they must match it. A peer is asked first.

    Large files that are used while they arrive are fetched one after the other, each from its beginning.
    """
    filesystem, base = remote(uri)
    grew = arriving.grew if arriving is not None else None

    def began(name: str) -> None:
        if arriving is not None:
            arriving.began(name)

    def fetch(name: str, stored: str) -> None:
        source, copy = join(uri, stored), folder / name
        with writing(str(copy)):
            copy.parent.mkdir(parents=True, exist_ok=True)
            if peer is not None and found is not None and peer.fetch(name, found[name], copy, grew):
                count(relayed_bytes=found[name].size)
                return
        began(name)
        try:
            with reading(source):
                if not (
                    (peer is not None or arriving is not None)
                    and found is not None
                    and _get_in_order(filesystem, join(base, stored), name, found[name], copy, grew)
                ):
                    # A plain fetch may fill the file in any order, and earlier bytes may be the damaged ones.
                    began(name)
                    filesystem.get_file(join(base, stored), str(copy))
        except ArtifactMissingError as error:
            if isinstance(error.__cause__, OSError) and no_space(error.__cause__):
                raise unwritable(str(copy), error.__cause__) from error
            if found is not None and isinstance(error.__cause__, FileNotFoundError):
                raise _lost(uri, source) from error
            raise
        if found is not None and not found[name].describes(copy):
            raise _corrupt(uri, source)
        count(bytes=copy.stat().st_size)

    def fetch_all(group: list[str]) -> None:
        for name in group:
            fetch(name, names[name])
            if arriving is not None:
                arriving.completed(name)

    in_turn = [name for name in names if arriving is not None and found is not None and found[name].size > _RANGE]
    with ThreadPoolExecutor(WORKERS) as pool:
        groups = [*([name] for name in names if name not in in_turn), in_turn]
        for done in [pool.submit(fetch_all, group) for group in groups]:
            done.result()


def _get_in_order(
    filesystem: Any, path: str, name: str, entry: ManifestEntry, copy: Path, grew: Callable[[str, int], None] | None
) -> bool:
    """Fetch a file in order, to pass it on meanwhile: a store may fill a file in any order.

    Returns:
        Whether it succeeded. A plain fetch afterwards reports the error.
    """
    under_way: deque[tuple[float, Future[bytes]]] = deque()
    asked = written = 0
    size, ahead = _RANGE, _RANGES_AHEAD
    with ThreadPoolExecutor(_MOST_RANGES_AHEAD) as pool, copy.open("wb", buffering=0) as file:
        while under_way or asked < entry.size:
            while len(under_way) < ahead and asked < entry.size:
                start, asked = asked, min(asked + size, entry.size)
                part = pool.submit(filesystem.cat_file, path, start=start, end=asked)
                under_way.append((time.monotonic(), part))
            began, part = under_way.popleft()
            try:
                data = part.result()
            except OSError:
                return False
            if time.monotonic() - began < _QUICK_SECONDS:
                size, ahead = min(2 * size, _MOST_RANGE), _MOST_RANGES_AHEAD
            written += file.write(data) or 0
            if grew is not None:
                grew(name, written)
    return True
