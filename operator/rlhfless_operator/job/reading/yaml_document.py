"""The reader of YAML documents: it reads them as the API server's tools do, and records the line of every field.

PyYAML follows YAML 1.1, in which `1e-6` is text and `1:30` is ninety. This module reads plain scalars as `kubectl`
does, and refuses scalars that the two would read differently.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlhfless_operator.job.reading.fields import Path

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_AMBIGUOUS_WORD = re.compile(r"[yY]|[nN]|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_AMBIGUOUS_NUMBER = re.compile(r"[-+]?(0[0-9_]+|0[xob][0-9a-fA-F_]+|[0-9]+_[0-9_]*)")
_TOO_DEEP = "the document is nested too deeply"
_SHALLOW = "write a job as in examples/"
_TEXT_TAG = "tag:yaml.org,2002:str"
_MOST_NODES = 50_000
MOST_DEPTH = 40
"""Number of levels of a document, its values included. Python's own limit of calls differs between processes."""


@dataclass(frozen=True)
class DocumentFault:
    """A fault of the text itself."""

    path: Path
    line: int
    """Counted from 1."""
    message: str
    remedy: str
    of_name: bool = False
    """Whether the field's name is ambiguous, rather than its value."""


@dataclass
class Document:
    """A mapping, and the lines of its parts in the text."""

    content: dict[str, Any]
    lines: dict[Path, int] = field(default_factory=dict)
    """Line, counted from 1, of each field's name and of each list item."""

    def line(self, path: Path) -> int:
        """Return the line of `path`, or of its nearest parent that the document has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def value(self, path: Path) -> Any:
        """Return the value at `path`; None if there is none."""
        return value_at(self.content, path)


class UnreadableDocumentError(ValueError):
    """The text is not one unambiguous YAML mapping.

    Args:
        faults: all faults, at least one, in the order of the text.
        document: the document without the faulty values; None if the text is not a mapping.
    """

    def __init__(self, faults: list[DocumentFault], document: Document | None = None) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults
        self.document = document


def value_at(content: Any, path: Path) -> Any:
    """Return the value at `path` of plain mappings and lists; None if there is none."""
    for part in path:
        try:
            content = content[part]
        except (KeyError, IndexError, TypeError):
            return None
    return content


class _TooDeepError(yaml.YAMLError):
    """The text has more levels than a document may have; the next is in `line`, counted from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(_TOO_DEEP)
        self.line = line


class _Loader(yaml.SafeLoader):
    """PyYAML's parser, which leaves the tag empty on every value without a tag in the text, and reads no deep text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise _TooDeepError(self.line + 1)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        return ""


def read_document(text: str) -> Document:
    """Read one YAML mapping.

    Raises:
        UnreadableDocumentError: for broken syntax, a repeated or nameless key, a tag, no or several documents,
            anything other than a mapping, and scalars that YAML's versions read differently.
    """
    try:
        roots = list(yaml.compose_all(text, Loader=_Loader))
    except _TooDeepError as error:
        raise _unreadable(error.line, _TOO_DEEP, _SHALLOW) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.problem, error.context)))
        raise _unreadable(mark.line + 1 if mark else 1, f"not YAML: {problem}", _syntax_remedy(text, mark)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character {chr(error.character)!r} is not allowed in YAML"
        raise _unreadable(line, message, "remove it") from None
    except (ValueError, OverflowError) as error:  # PyYAML lets impossible escapes and directives through
        raise _unreadable(1, f"not YAML: {error}", "remove escapes and directives that no text needs") from None
    if len(roots) > 1:
        raise _unreadable(roots[1].start_mark.line + 1, "a second document begins", "keep one job in a file")
    if not roots or (isinstance(roots[0], yaml.ScalarNode) and _NULL.fullmatch(roots[0].value)):
        raise _unreadable(1, "the document is empty", "write a job as in examples/")
    if not isinstance(roots[0], yaml.MappingNode):
        found = "a list" if isinstance(roots[0], yaml.SequenceNode) else "text"
        raise _unreadable(
            roots[0].start_mark.line + 1, f"the document is {found}", "write fields such as kind: RLHFJob"
        )
    builder = _Builder()
    content = builder.build(roots[0], ())
    document = Document(content, builder.lines)
    if builder.faults:
        raise UnreadableDocumentError(sorted(builder.faults, key=lambda fault: fault.line), document)
    return document


def read_value(text: str) -> Any:
    """Read one YAML value, such as `5`, `[a, b]` or `{name: ppo}`, by the rules for documents.

    Raises:
        UnreadableDocumentError: for broken syntax, and for scalars that YAML's versions read differently.
    """
    try:
        roots = list(yaml.compose_all(text, Loader=_Loader))
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise _unreadable(1, f"{text!r:.80} is not YAML", "put it in quotes") from error
    if len(roots) != 1:
        return None if not roots else text
    builder = _Builder()
    value = builder.build(roots[0], ())
    if builder.faults:
        raise UnreadableDocumentError(builder.faults)
    return value


class _Builder:
    """The conversion of PyYAML's nodes to plain values."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.faults: list[DocumentFault] = []
        self._open: list[yaml.Node] = []
        self._nodes = 0

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        line = node.start_mark.line + 1
        if self._nodes > _MOST_NODES:
            if self._nodes == _MOST_NODES + 1:
                self._fault(path, line, "the document grows too large", "use fewer aliases")
            return None
        if len(self._open) == MOST_DEPTH:
            self._fault(path, line, _TOO_DEEP, _SHALLOW)
            return None
        if any(node is ancestor for ancestor in self._open):
            self._fault(path, line, "the alias contains itself", "write the value out")
            return None
        if node.tag and not (node.tag == _TEXT_TAG and isinstance(node, yaml.ScalarNode)):
            self._fault(path, line, f"the tag {node.tag} is not supported", "remove it")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, line)
        self._open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                items = []
                for position, item in enumerate(node.value):
                    self.lines[(*path, position)] = item.start_mark.line + 1
                    items.append(self.build(item, (*path, position)))
                return items
            return self._mapping(node.value, path)
        finally:
            self._open.pop()

    def _mapping(self, entries: list[tuple[yaml.Node, yaml.Node]], path: Path) -> dict[str, Any]:
        own: dict[str, tuple[int, yaml.Node]] = {}
        merged: list[yaml.Node] = []
        for key, value in entries:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._fault(path, line, "a field's name must be text", "write name: value")
            elif key.value == "<<" and key.style is None:
                merged.extend(value.value if isinstance(value, yaml.SequenceNode) else [value])
            elif not isinstance(self._scalar(key, (*path, key.value), line, of_name=True), str):
                self._fault((*path, key.value), line, "a field's name must be text", "put it in quotes")
            elif key.value in own:
                first = own[key.value][0]
                self._fault((*path, key.value), line, f"given a second time (first in line {first})", "remove one")
            else:
                own[key.value] = (line, value)
        content: dict[str, Any] = {}
        # The first of several merged mappings wins, and this mapping's own entries override all of them.
        for source in reversed(merged):
            if isinstance(source, yaml.MappingNode):
                inherited = self.build(source, path)
                content.update(inherited if isinstance(inherited, dict) else {})
            else:
                self._fault(path, source.start_mark.line + 1, "<< needs a mapping", "name an anchor of a mapping")
        for name, (line, value) in own.items():
            self.lines[(*path, name)] = line
            content[name] = self.build(value, (*path, name))
        return content

    def _scalar(self, node: yaml.ScalarNode, path: Path, line: int, *, of_name: bool = False) -> Any:
        text: str = node.value
        if node.style is not None or node.tag:
            return text
        if _AMBIGUOUS_WORD.fullmatch(text):
            remedy = (
                f'put the name in quotes: "{text}"'
                if of_name
                else f'write true or false, or "{text}" in quotes for text'
            )
            message = f"some YAML readers take {text} as a truth value, others as text"
            self._fault(path, line, message, remedy, of_name=of_name)
        elif _AMBIGUOUS_NUMBER.fullmatch(text):
            remedy = f'write a plain decimal number, or "{text}" in quotes for text'
            message = f"YAML readers disagree on the number that {text} stands for"
            self._fault(path, line, message, remedy, of_name=of_name)
        elif _NULL.fullmatch(text):
            return None
        elif _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
            return bool(_TRUE.fullmatch(text))
        elif _INTEGER.fullmatch(text) and len(text) <= 18:
            return int(text)
        elif _FLOAT.fullmatch(text):
            return float(text)
        elif _NOT_FINITE.fullmatch(text):
            return float(text.replace(".", ""))
        return text

    def _fault(self, path: Path, line: int, message: str, remedy: str, *, of_name: bool = False) -> None:
        self.faults.append(DocumentFault(path, line, message, remedy, of_name))


def _unreadable(line: int, message: str, remedy: str) -> UnreadableDocumentError:
    return UnreadableDocumentError([DocumentFault((), line, message, remedy)])


def _syntax_remedy(text: str, mark: yaml.Mark | None) -> str:
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line:
        return "indent with spaces, not with a tab"
    return "check the indentation, the colons and the quotes here and in the line above"
