"""The files of a source: a single file, a folder or pattern of shards, one split of several.

This module is light, because the control plane imports it too.
"""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from rlhfless_functions.data.rows import kind_of_file

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
"""Words in the names of files, as `datasets` knows them, and the splits that they mean."""
_SAVED = ("state.json", "dataset_dict.json")
"""Files of a folder that `save_to_disk` wrote."""
_NOT_DATA = frozenset({*_SAVED, "dataset_info.json", "dataset_infos.json", "metadata.json", "config.json"})
_MAGIC = re.compile(r"[*?[]")
_WORD = re.compile(r"[A-Za-z]+")


class SourceError(ValueError):
    """The files of a source can't be told.

    Args:
        message: the fault.
        remedy: its remedy.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}; {remedy}")
        self.message, self.remedy = message, remedy


def is_pattern(source: str) -> bool:
    """Return whether a source may be a pattern such as `data/train-*.parquet`."""
    return _MAGIC.search(source) is not None


def is_saved(names: Sequence[str]) -> bool:
    """Return whether a folder of these files was written by `save_to_disk`."""
    return any(name in _SAVED for name in names)


def choose_split(splits: Sequence[str], split: str | None, source: str) -> str:
    """Return the split to read of those that there are.

    Raises:
        SourceError: it is not there, or none is named and there are several without `train`.
    """
    have = ", ".join(splits)
    if split is not None:
        meant = next((each for each in splits if each == split or _SPLITS.get(each) == _SPLITS.get(split, split)), None)
        if meant is None:
            raise SourceError(f"{source} has no split {split!r}", f"set data.split to one of {have}")
        return meant
    if len(splits) == 1 or "train" in splits:
        return "train" if "train" in splits else splits[0]
    raise SourceError(f"{source} has the splits {have}, and none is train", "set data.split to one of them")


def choose_files(names: Sequence[str], source: str, split: str | None, *, pattern: bool) -> list[str]:
    """Return the files of a source that are read, all of one format.

    Args:
        names: paths of all files below the folder, or that match the pattern.
        source: the folder or pattern, for messages.
        split: the split to read; by default `train`, if file names tell splits apart.
        pattern: whether they match a pattern: then all of them count, unless a split is asked for.

    Raises:
        SourceError: there are none, or it is not clear which are meant.
    """
    found = sorted(name for name in names if _is_data(name))
    if not found:
        what = "matches no" if pattern else "has no"
        raise SourceError(
            f"{source} {what} file of JSON lines, JSON, Parquet, CSV, TSV or Arrow",
            "check the path, and name files that end in .jsonl, .json, .parquet, .csv, .tsv or .arrow",
        )
    if not pattern:
        found = _in_one_folder(found, source)
    by_split: dict[str, list[str]] = {}
    for name in found:
        by_split.setdefault(_split_of(name), []).append(name)
    if split is not None or (not pattern and len(by_split) > 1):
        if "" in by_split and split is None:
            raise SourceError(
                f"{source} has {by_split[''][0]} beside files of a split ({', '.join(filter(None, by_split))})",
                f"name the files with a pattern, such as {source.rstrip('/')}/*.jsonl, or set data.split",
            )
        found = by_split[choose_split([each for each in by_split if each], split, source)]
    kinds = sorted({str(kind_of_file(name)) for name in found})
    if len(kinds) > 1:
        raise SourceError(
            f"{source} has files of several formats ({', '.join(kinds)})",
            "name those of one format with a pattern, such as FOLDER/*.parquet",
        )
    return found


def local_files(path: Path, split: str | None) -> list[Path] | None:
    """Return the files of a local source; None for a folder that `save_to_disk` wrote.

    Raises:
        SourceError: there are none, or it is not clear which are meant.
    """
    if path.is_file():
        if split is not None:
            raise SourceError(f"{path} is a file, which has no splits", "remove data.split")
        return [path]
    if path.is_dir():
        names = [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]
        if is_saved(names):
            return None
        return [path / name for name in choose_files(names, str(path), split, pattern=False)]
    matching = [str(each) for each in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if each.is_file()]
    return [Path(name) for name in choose_files(matching, str(path), split, pattern=True)]


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "_")) for part in path.parts if part not in ("/", ".", ".."))
    return not hidden and path.name not in _NOT_DATA and kind_of_file(name) is not None


def _in_one_folder(names: Sequence[str], source: str) -> list[str]:
    """Return the files that lie at the top; if none do, those of the only folder, or of folders named as splits."""
    top = [name for name in names if "/" not in name]
    folders = sorted({name.partition("/")[0] for name in names if "/" in name})
    if top or all(folder.lower() in _SPLITS for folder in folders):
        return top or list(names)
    if len(folders) > 1:
        raise SourceError(f"{source} has the folders {', '.join(folders)}", "name one of them")
    (folder,) = folders
    inner = _in_one_folder([name.partition("/")[2] for name in names], f"{source.rstrip('/')}/{folder}")
    return [f"{folder}/{name}" for name in inner]


def _split_of(name: str) -> str:
    """Return the split that a file's name tells, or its folder's; an empty text if none does."""
    path = PurePosixPath(name)
    words = [word.lower() for part in (path.name, path.parent.name) for word in _WORD.findall(part)]
    return next((_SPLITS[word] for word in words if word in _SPLITS), "")
