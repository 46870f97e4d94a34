"""The expansion of a word: quotes, variables, arithmetic and the few commands whose output is a matter of text."""

import posixpath
import re
from collections.abc import Callable

from rlhfless_operator.convert.shell.arithmetic import calculate
from rlhfless_operator.convert.shell.nodes import Simple
from rlhfless_operator.convert.shell.parameters import expand_parameter
from rlhfless_operator.convert.shell.parsing import parse
from rlhfless_operator.convert.shell.patterns import escaped, expand_braces
from rlhfless_operator.convert.shell.scanning import ShellSyntaxError, end_of_brackets, end_of_part
from rlhfless_operator.convert.shell.values import HOME, State, Unknowns, UnknownValueError, Whole, is_known

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}


class _Fields:
    """The words that a word becomes."""

    def __init__(self, *, split: bool) -> None:
        self.done: list[str] = []
        self._current: str | None = None
        self.split = split

    def add(self, text: str) -> None:
        self._current = (self._current or "") + text

    def end(self) -> None:
        """End a word, between two items of an array."""
        if not self.split:
            self.add(" ")
        elif self._current is not None:
            self.done.append(self._current)
            self._current = None

    def add_split(self, text: str) -> None:
        """Add text whose words are words of their own."""
        if not self.split:
            self.add(text)
            return
        for number, part in enumerate(re.split(r"[ \t\n]+", text)):
            if number:
                self.end()
            if part:
                self.add(part)

    def finished(self) -> list[str]:
        self.end()
        return self.done

    def text(self) -> str:
        """Return the text of a word that is not split."""
        return self._current or ""


class Words:
    """Expands words in a state of a script.

    Args:
        state: returns the variables.
        unknowns: parts that are known only when the script runs.
    """

    def __init__(self, state: Callable[[], State], unknowns: Unknowns) -> None:
        self._state = state
        self.unknowns = unknowns
        self.unset_is_empty = False
        """Whether variables that are not set are empty, as in conditions; otherwise they are unknown."""

    @property
    def state(self) -> State:
        return self._state()

    def fields(self, word: str) -> list[str]:
        """Return the words that a word of a command becomes."""
        words = [self._at_home(one) for one in expand_braces(word)]
        return [field for one in words for field in self._walk(one, _Fields(split=True)).finished()]

    def default(self, word: str) -> Whole:
        """Return the words of a default outside of quotes, which are split at its own spaces, too."""
        fields = _Fields(split=True)
        found = Whole(self._walk(self._at_home(word), fields, literal=fields.add_split).finished())
        found.text = self.text(word)
        return found

    def _at_home(self, word: str) -> str:
        """Replace `~` where bash does: at the begin of a word, and of the value of an assignment."""
        begin = assignment.end() if (assignment := _ASSIGNMENT.match(word)) is not None else 0
        return word[:begin] + HOME + word[begin + 1 :] if re.match(r"~(/|$)", word[begin:]) else word

    def text(self, word: str) -> str:
        """Return the text that a word becomes where it is not split, as in an assignment."""
        fields = _Fields(split=False)
        fields.add("")
        return self._walk(re.sub(r"(^|:)~(?=/|$)", rf"\g<1>{HOME}", word), fields).text()

    def inner_text(self, word: str) -> str:
        """Return the text of a word inside of double quotes, such as that of a default."""
        fields = _Fields(split=False)
        fields.add("")
        self._quoted(word, fields)
        return fields.text()

    def pattern(self, word: str) -> str:
        """Return a pattern: quoted parts match themselves."""
        found, at = "", 0
        while at < len(word):
            end = end_of_part(word, at)
            part, at = word[at:end], end
            quoted = part[0] in "\\'\"" or part.startswith(("$'", '$"'))
            found += escaped(self.text(part)) if quoted else self.text(part)
        return found

    def number(self, text: str) -> int:
        """Return the value of arithmetic.

        Raises:
            UnknownValueError: a part of it is unknown, or it is no arithmetic.
        """
        return calculate(self._known(self.inner_text(text.replace('"', ""))), self._read, self._write)

    def _known(self, text: str) -> str:
        if not is_known(text):
            raise UnknownValueError("; ".join(self.unknowns.reasons(text)))
        return text

    def _read(self, name: str) -> str:
        base, mark, index = name.rstrip("]").partition("[")
        value = expand_parameter(f"{base}[{index}]" if mark else base, self, double=True)
        return self._known(value if isinstance(value, str) else " ".join(value))

    def _write(self, name: str, value: str) -> None:
        self.state.values[name] = value

    def _walk(self, word: str, fields: _Fields, literal: Callable[[str], None] | None = None) -> _Fields:
        at = 0
        while at < len(word):
            end = end_of_part(word, at)
            part, at = word[at:end], end
            if part[0] == "\\":
                fields.add("" if part == "\\\n" else part[1:])
            elif part[0] == "'":
                fields.add(part[1:-1])
            elif part.startswith("$'"):
                fields.add(_unescaped(part[2:-1]))
            elif part[0] == '"' or part.startswith('$"'):
                self._quoted(part[part.index('"') + 1 : -1], fields)
            elif len(part) > 1 and part[0] in "$`<>":
                value = self._expansion(part, double=False)
                if isinstance(value, Whole) and not fields.split:
                    value = value.text
                add = fields.add if isinstance(value, Whole) else fields.add_split
                for number, item in enumerate([value] if isinstance(value, str) else value):
                    if number:
                        fields.end()
                    add(item)
            else:
                (literal or fields.add)(part)
        return fields

    def _quoted(self, inner: str, fields: _Fields) -> None:
        at, empty = 0, True
        while at < len(inner):
            letter = inner[at]
            end = end_of_part(inner, at) if letter in '$`\\"' else at + 1
            part, at = inner[at:end], end
            if letter == "\\":
                fields.add("" if part == "\\\n" else part[1:] if part[1:] in ("$", "`", '"', "\\") else part)
            elif letter == '"':
                self._quoted(part[1:-1], fields)
            elif letter in "$`" and len(part) > 1:
                value = self._expansion(part, double=True)
                if isinstance(value, str):
                    fields.add(value)
                    empty = False
                    continue
                for number, item in enumerate(value):
                    if number:
                        fields.end()
                    fields.add(item)
                    empty = False
                continue
            else:
                fields.add(part)
            empty = False
        if empty and not inner:
            fields.add("")

    def _expansion(self, part: str, *, double: bool) -> str | list[str]:
        arithmetic = part.startswith("$((") and part.endswith("))") and end_of_brackets(part, 2) == len(part) - 1
        if arithmetic or part.startswith("$["):
            try:
                return str(self.number(part[3:-2] if arithmetic else part[2:-1]))
            except UnknownValueError as error:
                return self.unknowns.add(str(error))
        if part.startswith(("$(", "`")):
            inner = part[2:-1] if part[0] == "$" else re.sub(r"\\([`$\\])", r"\1", part[1:-1])
            return self._output(inner, " ".join(part.split()))
        if part[0] in "<>":
            return self.unknowns.add(f"{part} is a command's output")
        return expand_parameter(part[2:-1] if part.startswith("${") else part[1:], self, double=double)

    def _output(self, command: str, shown: str) -> str:
        """Return the output of a command that only rewrites text; it is unknown of others."""
        try:
            nodes = parse(command)
            if len(nodes) == 1 and isinstance(nodes[0], Simple):
                name, *arguments = [field for word in nodes[0].words for field in self.fields(word)] or [""]
                if (found := _rewritten(name, arguments)) is not None:
                    return found
        except (ShellSyntaxError, UnknownValueError):
            pass
        return self.unknowns.add(f"{shown} is the output of a command")


def _rewritten(name: str, arguments: list[str]) -> str | None:
    if not all(map(is_known, arguments)) or any(argument.startswith("-") for argument in arguments):
        return None
    if name == "pwd" and not arguments:
        return "."
    if name == "echo":
        return " ".join(arguments).rstrip("\n")
    if name == "dirname" and len(arguments) == 1:
        return posixpath.dirname(arguments[0].rstrip("/")) or ("/" if arguments[0].startswith("/") else ".")
    if name == "basename" and 1 <= len(arguments) <= 2:
        base = posixpath.basename(arguments[0].rstrip("/"))
        return base.removesuffix(arguments[1]) if arguments[1:] and base != arguments[1] else base
    return None


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text, flags=re.DOTALL)
