"""Digests of the files that a job reads: data, templates, models, and the code of rewards.

A job's document names them, but does not hold them. With their digests, a driver that resumes the job sees which of
them changed since the driver before.
"""

import ast
import glob
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from pydantic import BaseModel, ConfigDict, ValidationError

from rlhfless_functions import artifacts
from rlhfless_operator.records.folder import JobFolder

_DIGESTS, _CHANGES = "inputs.json", "inputs.jsonl"
_LARGE = 64 * 2**20
_SAMPLES, _SAMPLE = 64, 64 * 2**10
"""Number and bytes of the pieces that are read of a large file of weights: other training changes all of it."""
_OF_A_MODEL = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".tiktoken")


class FileDigest(BaseModel):
    """One file, as it was read."""

    model_config = ConfigDict(frozen=True)

    size: int
    modified: int
    """Nanoseconds; while this and the size stay, the file is not read again."""
    digest: str


class InputDigest(BaseModel):
    """The files that one field of a document names."""

    model_config = ConfigDict(frozen=True)

    source: str
    """Path or URI in the document."""
    settings: str = ""
    """Digest of the settings with which the source is read, for inputs that are taken anew if these change."""
    files: dict[str, FileDigest]
    """Its files, by their paths."""

    def same(self, other: "InputDigest") -> bool:
        """Return whether another reading found the same content, wherever it lies."""
        return self.settings == other.settings and self._contents() == other._contents()

    def _contents(self) -> list[str]:
        return sorted(file.digest for file in self.files.values())


class InputChange(BaseModel):
    """A line of `inputs.jsonl`."""

    model_config = ConfigDict(frozen=True)

    from_step: int
    """First step with the new content."""
    inputs: list[str]
    """Fields with what they name, for people."""


Digests = dict[str, InputDigest]
"""By the field of the document."""


def take_digest(
    source: str, known: InputDigest | None, *, model: bool = False, code: bool = False, settings: str = ""
) -> InputDigest | None:
    """Take the digest of what a field names; None if it is nowhere to be seen from here, as a name on a hub is.

    Args:
        source: path, pattern or URI.
        known: an earlier digest, whose unchanged files are not read again.
        model: only a model's own files count, and large ones are read in samples.
        code: a Python file; the files beside it that it imports count too.
        settings: how the source is read.
    """
    earlier = known.files if known is not None else {}
    path = artifacts.local_path(source)
    try:
        if path is not None:
            files = _local(_with_imports(path) if code else _files_of(path, model), earlier, sampled=model)
        else:
            files = _remote(source)
    except Exception:  # It is not reached from here; those who read it say more.
        return None
    return InputDigest(source=source, settings=settings, files=files) if files else None


def read_digests(folder: JobFolder) -> Digests | None:
    """Return the digests that the last driver took; None if there are none."""
    uri = folder.file(_DIGESTS)
    if not artifacts.exists(uri):
        return None
    try:
        return {name: InputDigest.model_validate(each) for name, each in artifacts.read_json(uri).items()}
    except (ValidationError, AttributeError) as error:
        raise artifacts.ArtifactCorruptError(f"{uri} is damaged ({error}); remove it") from error


def write_digests(folder: JobFolder, digests: Mapping[str, InputDigest]) -> None:
    """Write the digests of a driver."""
    artifacts.write_json(folder.file(_DIGESTS), {name: each.model_dump() for name, each in digests.items()})


def changed(before: Mapping[str, InputDigest], now: Mapping[str, InputDigest]) -> list[str]:
    """Return the fields whose content is another one. What either driver could not see is not compared."""
    return [name for name in now if name in before and not before[name].same(now[name])]


def read_changes(folder: JobFolder) -> list[InputChange]:
    """Return the changes during the run that were taken, oldest first."""
    uri = folder.file(_CHANGES)
    lines = artifacts.read_bytes(uri).splitlines() if artifacts.exists(uri) else []
    return [InputChange.model_validate_json(line) for line in lines]


def record_change(folder: JobFolder, change: InputChange) -> None:
    """Append a change that is taken."""
    lines = [*read_changes(folder), change]
    text = "".join(f"{each.model_dump_json()}\n" for each in lines)
    artifacts.write_bytes(folder.file(_CHANGES), text.encode())


# --- files -------------------------------------------------------------------------------------------------------


def _files_of(path: Path, model: bool) -> Sequence[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        found = path.iterdir() if model else path.rglob("*")
        wanted = (each for each in found if each.is_file() and not each.name.startswith("."))
        return sorted(each for each in wanted if not model or each.suffix in _OF_A_MODEL)
    return sorted(each for each in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if each.is_file())


def _with_imports(path: Path) -> list[Path]:
    """Return a Python file, and the files in its folder that it imports, directly or not."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file():
            continue
        found[file] = None
        waiting += [path.parent / f"{name}.py" for name in _imported(file)]
    return list(found)


def _imported(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def _local(paths: Iterable[Path], earlier: Mapping[str, FileDigest], *, sampled: bool) -> dict[str, FileDigest]:
    files = {}
    for path in paths:
        state = path.stat()
        known = earlier.get(str(path))
        if known is None or (known.size, known.modified) != (state.st_size, state.st_mtime_ns):
            digest = _sampled(path, state.st_size) if sampled and state.st_size > _LARGE else _whole(path)
            known = FileDigest(size=state.st_size, modified=state.st_mtime_ns, digest=digest)
        files[str(path)] = known
    return files


def _whole(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled(path: Path, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek((size - _SAMPLE) * number // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _remote(uri: str) -> dict[str, FileDigest]:
    """Return what a store says of its files, which are not read: their tags, or their sizes and times."""
    filesystem, path = url_to_fs(uri, use_listings_cache=False)
    found: dict[str, Any] = {}
    for name in filesystem.glob(path) if glob.has_magic(path) else [path]:
        found |= filesystem.find(name, detail=True)
    return {name: _described(info) for name, info in found.items()}


def _described(info: Mapping[str, Any]) -> FileDigest:
    names = ("ETag", "etag", "md5Hash", "content_md5", "md5", "checksum", "LastModified", "mtime", "created")
    tag = next((info[name] for name in names if info.get(name)), "")
    size = int(info.get("size") or 0)
    return FileDigest(size=size, modified=0, digest=json.dumps([size, str(tag)]))
