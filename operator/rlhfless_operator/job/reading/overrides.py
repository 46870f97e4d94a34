"""Values of a job document that the command line overrides: `--set spec.steps=5`."""

import copy
from collections.abc import Sequence
from typing import Any

from rlhfless_operator.job.reading.fields import Path, show_path
from rlhfless_operator.job.reading.remedies import show_value, unit_at
from rlhfless_operator.job.reading.yaml_document import Document, DocumentFault, UnreadableDocumentError, read_value


def override(document: Document, settings: Sequence[str]) -> tuple[Document, list[DocumentFault]]:
    """Set values in a document. A later setting overrides an earlier one.

    Args:
        document: the document as read.
        settings: `path=value` each: names and list positions separated by dots, and a value in YAML.

    Returns:
        The document, and the faults of the settings that were skipped: a missing `=`, a value that is not YAML, or a
        path through something other than a mapping or list.
    """
    content = copy.deepcopy(document.content)
    lines = dict(document.lines)
    faults: list[DocumentFault] = []
    for setting in settings:
        try:
            path = _set(content, setting)
        except UnreadableDocumentError as error:
            faults += [DocumentFault((), 0, f"{setting}: {one.message}", one.remedy) for one in error.faults]
            continue
        # The value replaces everything below it. Line 0 stands for the command line.
        lines = {other: line for other, line in lines.items() if other[: len(path)] != path}
        lines[path] = 0
    return Document(content, lines), faults


def _set(content: dict[str, Any], setting: str) -> Path:
    """Set one value, and create missing mappings around it."""
    text, equals, value = setting.partition("=")
    if not equals or not text.strip():
        raise _fault("has no value", "write path=value, such as --set spec.steps=5")
    parts = text.strip().split(".")
    place: Any = content
    path: Path = ()
    for number, part in enumerate(parts):
        key = _key(place, part, path)
        path = (*path, key)
        if number == len(parts) - 1:
            read = read_value(value)
            # A price or an amount of money is exact: what the command line has is kept as written.
            place[key] = value.strip() if isinstance(read, float) and unit_at(path) == "money" else read
        elif isinstance(place, list) or place.get(key) is not None:
            place = place[key]
        else:
            place[key] = {}
            place = place[key]
    return path


def _key(place: Any, part: str, path: Path) -> str | int:
    if isinstance(place, dict):
        if not part:
            raise _fault("has an empty name between its dots", "write path=value, such as --set spec.steps=5")
        return part
    if isinstance(place, list):
        if part.isdecimal() and int(part) < len(place):
            return int(part)
        remedy = f"write a position from 0 to {len(place) - 1}, or the whole list" if place else "write the whole list"
        raise _fault(f"{show_path(path)} is a list without {part!r}", remedy)
    raise _fault(f"{show_path(path)} is {show_value(place)} and has no fields", f"set {show_path(path)} itself")


def _fault(message: str, remedy: str) -> UnreadableDocumentError:
    return UnreadableDocumentError([DocumentFault((), 0, message, remedy)])
