"""The manifest, which makes a folder a published one.

Checksums reveal a file that was damaged or cut short. They do not reveal a forged one: a writer of the file can write
the manifest too. XXH3 is many times faster than SHA-256, for which a live engine would wait at each update of its
weights.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from rlhfless_functions.artifacts.errors import ArtifactCorruptError, ArtifactMissingError
from rlhfless_functions.artifacts.files import exists, join, read_bytes
from rlhfless_functions.artifacts.names import inside
from rlhfless_functions.artifacts.sealing import BLANK, KEY, parse_sealed, seal

MANIFEST = "manifest.json"
"""Name of the manifest in its folder."""

WORKERS = 4
"""Threads that hash, upload or download the files of one folder."""

_DIGEST = re.compile("[0-9a-f]{64}")
_WORTH_THREADS = 16 * 2**20
_FORMAT = 2


@dataclass(frozen=True)
class ManifestEntry:
    """One file of a published folder."""

    size: int
    """Bytes."""
    checksum: str
    """Algorithm and hexadecimal digest, such as `xxh3-128:99aa06d3014798d86001c324468d497f`."""
    stored: str | None = None
    """Place of the file, relative to the folder, if an interrupted publication had taken its own name."""

    @staticmethod
    def of(path: Path) -> "ManifestEntry":
        """Return the size and the checksum of a local file."""
        return ManifestEntry(path.stat().st_size, _checksum(path))

    def describes(self, path: Path) -> bool:
        """Return whether a local file has this checksum."""
        return _checksum(path) == self.checksum


@dataclass(frozen=True)
class Delta:
    """The changes of a published folder since another one, for readers that have a copy of the other."""

    base: str
    """Digest of the other folder's URI and manifest. Its copies have this name."""
    files: dict[str, ManifestEntry]
    """For each path, the delta that makes its file from the other folder's file of the same path; see `deltas`.
    Unchanged files are missing, and so are files whose delta would hardly be smaller."""


@dataclass(frozen=True)
class Manifest:
    """The files of a published folder, by path relative to it."""

    files: dict[str, ManifestEntry]
    delta: Delta | None = None

    def dump(self) -> bytes:
        """Return its JSON form, which has a checksum of its own."""
        content: dict[str, Any] = {"format": _FORMAT, "files": _dumped(self.files)}
        if self.delta is not None:
            content["delta"] = {"base": self.delta.base, "files": _dumped(self.delta.files)}
        return seal(json.dumps({**content, KEY: BLANK}, indent=1).encode())

    @staticmethod
    def parse(data: bytes) -> "Manifest":
        """Read the JSON form.

        Raises:
            ValueError: it is not a manifest, or not as it was written.
        """
        try:
            content = parse_sealed(data)
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']}, and {_FORMAT} is known here")
            delta = content.get("delta")
            return Manifest(_parsed(content["files"]), None if delta is None else _delta(**delta))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no manifest: {error!r}") from error


def manifest(uri: str) -> Manifest | None:
    """Return the manifest of a folder; None if nothing has been published there.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
        ArtifactCorruptError: if the manifest is unreadable.
    """
    place = join(uri, MANIFEST)
    try:
        data = read_bytes(place)
    except ArtifactMissingError:
        if exists(place):
            raise
        return None
    try:
        return Manifest.parse(data)
    except ValueError as error:
        raise ArtifactCorruptError(f"{place} is unreadable ({error}): {remedy(uri)}") from error


def is_published(uri: str) -> bool:
    """Return whether the folder has been published.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
    """
    return exists(join(uri, MANIFEST))


def damaged(folder: Path, files: Mapping[str, ManifestEntry]) -> list[str]:
    """Return the names of the files in a local folder that differ from their entries' checksums. Threads read the large
    ones."""
    paths = [folder / name for name in files]
    if sum(path.stat().st_size for path in paths) < _WORTH_THREADS:
        sound = [entry.describes(path) for path, entry in zip(paths, files.values(), strict=True)]
    else:
        with ThreadPoolExecutor(WORKERS) as pool:
            sound = list(pool.map(lambda path, entry: entry.describes(path), paths, files.values()))
    return [name for name, is_sound in zip(files, sound, strict=True) if not is_sound]


def remedy(uri: str) -> str:
    """Return the remedy for a published folder that is damaged."""
    return f"restore {uri} from a copy, or start the job that made it over"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return f"xxh3-128:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"


def _dumped(files: Mapping[str, ManifestEntry]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in asdict(entry).items() if value is not None}
        for name, entry in sorted(files.items())
    }


def _parsed(files: Mapping[str, Any]) -> dict[str, ManifestEntry]:
    return {inside(name): _entry(**entry) for name, entry in files.items()}


def _entry(size: int, checksum: str, stored: str | None = None) -> ManifestEntry:
    if not isinstance(size, int) or size < 0 or not isinstance(checksum, str):
        raise ValueError(f"{size!r} is no size, or {checksum!r} no checksum")
    return ManifestEntry(size, checksum, None if stored is None else inside(stored))


def _delta(base: str, files: Mapping[str, Any]) -> Delta:
    if not _DIGEST.fullmatch(base):
        raise ValueError(f"{base!r} is no digest")
    return Delta(base, _parsed(files))
