"""The manifest that makes a folder a published one."""

import hashlib
import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhfless_functions.artifacts.errors import ArtifactCorruptError, ArtifactMissingError
from rlhfless_functions.artifacts.files import exists, join, read_bytes

MANIFEST = "manifest.json"
"""Name of the manifest in its folder."""

WORKERS = 4
"""Threads that hash, upload or download the files of one folder."""

_WORTH_THREADS = 16 * 2**20


@dataclass(frozen=True)
class ManifestEntry:
    """One file of a published folder."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digest."""
    stored: str | None = None
    """Where the file is, relative to the folder, if an interrupted publication had taken its own name."""

    @staticmethod
    def of(path: Path) -> "ManifestEntry":
        """Size and digest of a local file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ManifestEntry(path.stat().st_size, digest)


@dataclass(frozen=True)
class Manifest:
    """What a published folder consists of, by path relative to it."""

    files: dict[str, ManifestEntry]

    def dump(self) -> bytes:
        """Its JSON form."""
        files = {
            name: {key: value for key, value in asdict(entry).items() if value is not None}
            for name, entry in sorted(self.files.items())
        }
        return json.dumps({"format": 1, "files": files}, indent=1).encode()

    @staticmethod
    def parse(data: bytes) -> "Manifest":
        """Read the JSON form.

        Raises:
            ValueError: for anything else.
        """
        try:
            return Manifest({name: ManifestEntry(**entry) for name, entry in json.loads(data)["files"].items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no manifest: {error!r}") from error


def manifest(uri: str) -> Manifest | None:
    """The manifest of a folder; None if nothing has been published there.

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
    """Whether the folder has been published.

    Raises:
        ArtifactMissingError: if the store cannot be asked.
    """
    return exists(join(uri, MANIFEST))


def entries(folder: Path, names: Collection[str]) -> dict[str, ManifestEntry]:
    """Sizes and digests of files in a local folder; large ones are hashed in threads."""
    if sum((folder / name).stat().st_size for name in names) < _WORTH_THREADS:
        return {name: ManifestEntry.of(folder / name) for name in names}
    with ThreadPoolExecutor(WORKERS) as pool:
        return dict(zip(names, pool.map(lambda name: ManifestEntry.of(folder / name), names), strict=True))


def remedy(uri: str) -> str:
    """What to do about a published folder that is damaged."""
    return f"remove {uri} so that it is made again, or restore it from a copy"
