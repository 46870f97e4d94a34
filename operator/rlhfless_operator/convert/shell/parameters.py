"""The expansion of `${...}`."""

import re
from typing import Protocol

from rlhfless_operator.convert.shell.patterns import regular_expression
from rlhfless_operator.convert.shell.scanning import end_of_brackets, end_of_part
from rlhfless_operator.convert.shell.values import HOME, State, Unknowns, UnknownValueError, Whole, is_known

_NAME = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!-])", re.ASCII)
_OPERATOR = re.compile(r":[-=+?]|[-=+?]|%%|%|##|#|//|/|:|\^\^|\^|,,|,|@")


class Expansion(Protocol):
    """Expands the words inside of `${...}`, in a state of the script."""

    unknowns: Unknowns
    unset_is_empty: bool

    @property
    def state(self) -> State: ...

    def default(self, word: str) -> Whole: ...

    def text(self, word: str) -> str: ...

    def inner_text(self, word: str) -> str: ...

    def pattern(self, word: str) -> str: ...

    def number(self, text: str) -> int: ...


def expand_parameter(inner: str, words: Expansion, *, double: bool) -> str | list[str]:
    """Return what `${inner}` becomes: text, or the items of an array."""
    if inner.startswith("!"):
        return _indirect(inner[1:], words, double=double)
    if inner.startswith("#") and len(inner) > 1 and _NAME.match(inner, 1):
        return _length(inner[1:], words)
    name = _NAME.match(inner)
    if name is None:
        return words.unknowns.add(f"${{{inner}}} is not read")
    at, index = name.end(), ""
    if inner.startswith("[", at):
        end = end_of_brackets(inner, at)
        index, at = inner[at + 1 : end - 1], end
    operator = _OPERATOR.match(inner, at)
    rest = inner[operator.end() :] if operator is not None else ""
    if operator is None and at != len(inner):
        return words.unknowns.add(f"${{{inner}}} is not read")
    value = _value(name[1], index, words)
    if operator is not None and operator[0].lstrip(":") in ("-", "=", "+", "?"):
        return _default(name[1], value, operator[0], rest, words, double=double)
    if value is None:
        if words.unset_is_empty:
            return ""
        if index in ("@", "*"):
            return []
        return words.unknowns.add(f"the script does not set {name[1]}")
    if operator is not None:
        return _changed(value, operator[0], rest, words)
    if isinstance(value, list) and double and "*" in (name[1], index):
        return " ".join(value)
    return value


def _value(name: str, index: str, words: Expansion) -> str | list[str] | None:
    state = words.state
    if index in ("@", "*"):
        return state.items(name) if name in state.values else None
    if index:
        values = state.values.get(name)
        if isinstance(values, dict):
            return values.get(words.text(index))
        try:
            place = words.number(index)
        except UnknownValueError as error:
            return words.unknowns.add(str(error))
        items = state.items(name)
        return items[place] if -len(items) <= place < len(items) else ""
    if name in ("@", "*"):
        return state.arguments
    if name == "#":
        unknown = [argument for argument in state.arguments if not is_known(argument)]
        return unknown[0] if unknown else str(len(state.arguments))
    if name.isdigit():
        return _argument(int(name), words)
    if name == "?":
        return words.unknowns.add("$? is the end of a command")
    if not name.isidentifier():
        return words.unknowns.add(f"${name} is known only when the script runs")
    if name in ("HOME", "PWD") and name not in state.values:
        return HOME if name == "HOME" else "."  # paths of a job are relative, too
    return state.text(name)


def _argument(number: int, words: Expansion) -> str | None:
    if number == 0:
        return words.unknowns.add("$0 is the script's own name")
    arguments = words.state.arguments
    return arguments[number - 1] if number <= len(arguments) else None


def _indirect(inner: str, words: Expansion, *, double: bool) -> str | list[str]:
    if inner.endswith(("[@]", "[*]")):
        values = words.state.values.get(inner[:-3])
        if isinstance(values, dict):
            return list(values)
        return [str(number) for number in range(len(words.state.items(inner[:-3])))]
    name = _NAME.match(inner)
    target = words.state.text(name[1]) if name is not None else None
    if name is None or target is None or not is_known(target):
        return words.unknowns.add(f"${{!{inner}}} is known only when the script runs")
    return expand_parameter(target + inner[name.end() :], words, double=double)


def _length(inner: str, words: Expansion) -> str:
    name, mark, index = inner.rstrip("]").partition("[")
    value = _value(name, index, words) if mark else _value(name, "", words)
    if value is None:
        return (
            "0"
            if words.unset_is_empty or index in ("@", "*")
            else words.unknowns.add(f"the script does not set {name}")
        )
    if isinstance(value, str) and HOME in value:
        return words.unknowns.add(f"${{#{inner}}} depends on the home folder")
    return str(len(value)) if isinstance(value, list) or is_known(value) else value


def _default(
    name: str, value: str | list[str] | None, operator: str, word: str, words: Expansion, *, double: bool
) -> str | list[str]:
    there = value is not None and (not operator.startswith(":") or bool(value))
    if operator.endswith("+"):
        return _word(word, words, double=double) if there else ""
    if there and value is not None:
        return value
    if operator.endswith("?"):
        return words.unknowns.add(f"the script does not set {name}")
    if operator.endswith("="):
        words.state.values[name] = words.inner_text(word) if double else words.text(word)
    return _word(word, words, double=double)


def _word(word: str, words: Expansion, *, double: bool) -> str | list[str]:
    return words.inner_text(word) if double else words.default(word)


def _changed(value: str | list[str], operator: str, word: str, words: Expansion) -> str | list[str]:
    if isinstance(value, list) and operator == ":":
        return _slice_of_items(value, word, words)
    if isinstance(value, list):
        return [_changed_text(item, operator, word, words) for item in value]
    return _changed_text(value, operator, word, words)


def _changed_text(value: str, operator: str, word: str, words: Expansion) -> str:
    if not is_known(value):
        return value
    try:
        if operator == ":" and HOME in value:
            return words.unknowns.add(f"${{…:{word}}} depends on the home folder")
        if operator == ":":
            return _slice(value, word, words)
        if operator in ("^^", ",,", "^", ","):
            changed = value.upper() if operator[0] == "^" else value.lower()
            return changed if len(operator) == 2 else changed[:1] + value[1:]
        if operator in ("%", "%%", "#", "##"):
            return _without(value, operator, words.pattern(word), words)
        if operator in ("/", "//"):
            return _replaced(value, operator, word, words)
    except UnknownValueError as error:
        return words.unknowns.add(str(error))
    return words.unknowns.add(f"${{…{operator}{word}}} is not read")


def _bounds(word: str, words: Expansion) -> tuple[int, int | None]:
    begin, mark, length = word.partition(":")
    return words.number(begin), words.number(length) if mark else None


def _slice(value: str, word: str, words: Expansion) -> str:
    begin, length = _bounds(word, words)
    begin = max(len(value) + begin, 0) if begin < 0 else begin
    return value[begin:] if length is None else value[begin : length if length < 0 else begin + length]


def _slice_of_items(value: list[str], word: str, words: Expansion) -> list[str] | str:
    try:
        begin, length = _bounds(word, words)
    except UnknownValueError as error:
        return words.unknowns.add(str(error))
    if value is words.state.arguments:
        begin -= 1
    return value[begin:] if length is None else value[begin : begin + length]


def _known_pattern(pattern: str, words: Expansion) -> str:
    if not is_known(pattern):
        raise UnknownValueError("; ".join(words.unknowns.reasons(pattern)))
    return regular_expression(pattern)


def _without(value: str, operator: str, pattern: str, words: Expansion) -> str:
    expression = re.compile(_known_pattern(pattern, words), re.DOTALL)
    ends = range(len(value) + 1)
    if operator[0] == "#":
        tried = [end for end in (ends if operator == "#" else reversed(ends)) if expression.fullmatch(value[:end])]
        return value[tried[0] :] if tried else value
    tried = [end for end in (reversed(ends) if operator == "%" else ends) if expression.fullmatch(value[end:])]
    return value[: tried[0]] if tried else value


def _replaced(value: str, operator: str, word: str, words: Expansion) -> str:
    at = 0
    if operator == "/" and word[:1] in ("#", "%"):
        anchor, at = word[0], 1
    else:
        anchor = ""
    begin = at
    while at < len(word) and word[at] != "/":
        at = end_of_part(word, at)
    expression = _known_pattern(words.pattern(word[begin:at]), words)
    by = words.text(word[at + 1 :])
    if not expression:
        return by + value if anchor == "#" else value + by if anchor == "%" else value
    if anchor == "#":
        expression = rf"\A(?:{expression})"
    elif anchor == "%":
        expression = rf"(?:{expression})\Z"
    return re.sub(expression, lambda match: by, value, count=0 if operator == "//" else 1, flags=re.DOTALL)
