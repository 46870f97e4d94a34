"""Sources of prompts from a peer's names: files, datasets on the Hugging Face hub, and several of either."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfless_operator.convert.conversion import Left, Written

Source = dict[str, Any]
"""A source as a job has it: fields of `data`, or of one of `data.sources`."""

BUILDERS = ("json", "parquet", "csv", "arrow")
"""Names that `load_dataset` has for kinds of files; the files are its `data_files` or `data_dir`."""

_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".pq", ".csv", ".tsv", ".arrow", ".gz", ".bz2", ".xz", ".zst")


def is_file(name: str) -> bool:
    """Return whether a name is a path or an address; a dataset on the hub otherwise."""
    return name.lower().endswith(_ENDINGS) or _HUB_NAME.fullmatch(name) is None


def source_of(name: Any, subset: Any = None, split: Any = None) -> Source:
    """Return the source of a name. A file has no configurations and no splits.

    Raises:
        ValueError: the name is empty.
    """
    if not name:
        raise ValueError("a dataset has no name")
    if is_file(str(name)):
        return {"source": str(name)}
    given = {"subset": subset, "split": split}
    return {"source": f"hub:{name}", **{field: str(value) for field, value in given.items() if value is not None}}


def fields_of(section: str, sources: Sequence[Source]) -> dict[str, Any]:
    """Return the fields of a section with these sources: `source` and its own fields, or `sources`.

    Args:
        section: `spec.data` or `spec.evaluation.data`.
    """
    if len(sources) == 1 and "weight" not in sources[0]:
        return {f"{section}.{field}": value for field, value in sources[0].items()}
    return {f"{section}.sources": list(sources)}


def files_of(value: Any) -> list[str]:
    """Return the names in a value, which may be one name."""
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


# --- entries as `load_dataset` and mixtures have them ---

_NAMES = {"id": "path", "config": "name"}
"""open-r1's names in a mixture, and TRL's."""

_KNOWN = {"path", "name", "split", "revision", "data_files", "data_dir", "columns", "weight", "changes"}
_FILTERS = ("filter", "select", "take", "skip", "shard", "train_test_split")


def entries_to(section: str, entries: Any) -> Written | Left:
    """Convert entries, each with the arguments of `load_dataset`.

    Args:
        section: `spec.data` or `spec.evaluation.data`.
        entries: `path`, `name`, `split`, `revision`, `data_files`, `data_dir`; `weight`, the share of rows that
            open-r1's mixtures take; `changes`, the name and function of each method that changes the rows.

    Raises:
        ValueError: no dataset is named, or an entry has a field that is not known.
    """
    notes: list[str] = []
    sources = [source for entry in entries for source in _sources(entry, notes)]
    if not sources:
        raise ValueError("it names no dataset")
    values = fields_of(section, sources)
    notes = list(dict.fromkeys(notes))
    return Left("; ".join(notes), values) if notes else Written(values)


def _sources(given: Any, notes: list[str]) -> list[Source]:
    entry = {_NAMES.get(str(name), str(name)): value for name, value in given.items() if value is not None}
    if "path" not in entry:
        raise ValueError("each of the datasets needs its path or id")
    if unknown := entry.keys() - _KNOWN:
        raise ValueError(f"{entry['path']} has {', '.join(sorted(unknown))}, which rlhfless does not know")
    name, split = str(entry["path"]), entry.get("split")
    if name in BUILDERS:
        files = entry.get("data_files", entry.get("data_dir"))
        if isinstance(files, Mapping):
            files = files.get(split or "train")
        if files is None:
            raise ValueError(f"{name} names no files")
        sources: list[Source] = [{"source": each} for each in files_of(files) if each]
    else:
        sources = [source_of(name, entry.get("name"), split)]
        if "revision" in entry:
            sources[0]["revision"] = str(entry["revision"])
        notes += [
            f"{field} of {name}: a job takes all files of a split; name others by hf://datasets/{name}/…"
            for field in ("data_files", "data_dir")
            if field in entry
        ]
    if split is not None and "[" in str(split) and not sources[0]["source"].startswith("hub:"):
        notes.append(f"split {split}: take these rows into a file of their own")
    more = {**_weight(entry.get("weight"), notes), **_functions(entry.get("changes", []), notes)}
    return [{**source, **more} for source in sources]


def _weight(weight: Any, notes: list[str]) -> Source:
    if weight is None or float(weight) == 1:
        return {}
    notes.append(
        f"weight {float(weight):g}: open-r1 takes that share of the rows once, and here the others come in later epochs"
    )
    return {"weight": float(weight)}


def _functions(changes: Sequence[tuple[str, str]], notes: list[str]) -> Source:
    """Return `map` and `filter` for the methods that change rows: functions that the user has to write into a file."""
    found: Source = {}
    for field, general in (("map", "turned"), ("filter", "kept")):
        calls = [(method, function) for method, function in changes if (method in _FILTERS) == (field == "filter")]
        if not calls:
            continue
        method, function = calls[0]
        own = len(calls) == 1 and method == field and function.isidentifier()
        found[field] = {"file": "rows.py", "function": function if own else general}
        shown = ", ".join(f".{method}({function})" for method, function in calls)
        notes.append(
            f"the script changes its rows by {shown}: write a function {found[field]['function']} of one row that does"
            " so into rows.py"
        )
    return found
