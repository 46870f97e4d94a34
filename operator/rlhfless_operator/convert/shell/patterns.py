"""Glob patterns as regular expressions, and the expansion of braces."""

import re
from collections.abc import Iterator

from rlhfless_operator.convert.shell.scanning import end_of_brackets, end_of_part
from rlhfless_operator.convert.shell.values import UnknownValueError

_RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?")


def escaped(text: str) -> str:
    """Return a pattern that matches a text literally."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def regular_expression(pattern: str) -> str:
    """Return a glob pattern as a regular expression, to use with `re.DOTALL`.

    Raises:
        UnknownValueError: it has extended patterns.
    """
    if re.search(r"[?*+@!]\(", pattern):
        raise UnknownValueError(f"the pattern {pattern} is not read")
    found, at = "", 0
    while at < len(pattern):
        letter = pattern[at]
        bracket = re.compile(r"\[([!^]?)(\]?[^\]]*)\]").match(pattern, at) if letter == "[" else None
        if letter == "\\":
            found += re.escape(pattern[at + 1 : at + 2])
            at += 2
        elif bracket is not None:
            found += f"[{'^' if bracket[1] else ''}{_bracket(bracket[2])}]"
            at = bracket.end()
        else:
            found += {"*": ".*", "?": "."}.get(letter, re.escape(letter))
            at += 1
    return found


def _bracket(text: str) -> str:
    classes = {"alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z", "space": r"\s"}
    text = re.sub(r"\[:(\w+):", lambda match: classes.get(match[1], ""), text)
    return re.sub(r"([\[\]&~|\\^])", r"\\\1", text)


def expand_braces(word: str) -> list[str]:
    """Expand `{a,b}` and `{1..3}` outside of quotes, as bash does before everything else."""
    at = 0
    while at < len(word):
        if word[at] == "{" and (found := _brace(word, at)) is not None:
            items, end = found
            return [
                f"{word[:at]}{inner}{rest}" for item in items for inner in [item] for rest in expand_braces(word[end:])
            ]
        at = end_of_part(word, at)
    return [word]


def _brace(word: str, at: int) -> tuple[list[str], int] | None:
    try:
        end = end_of_brackets(word, at)
    except ValueError:
        return None
    inner = word[at + 1 : end - 1]
    if (counted := _RANGE.fullmatch(inner)) is not None:
        return list(_range(counted)), end
    items = _split(inner)
    return ([one for item in items for one in expand_braces(item)], end) if len(items) > 1 else None


def _range(match: re.Match[str]) -> Iterator[str]:
    first, last, step = match[1], match[2], abs(int(match[3] or 1)) or 1
    numbers = first.lstrip("-").isdigit() and last.lstrip("-").isdigit()
    begin, end = (int(first), int(last)) if numbers else (ord(first), ord(last))
    wide = max(len(first), len(last)) if numbers and re.match(r"-?0\d", f"{first} {last}") else 0
    way = range(begin, end + 1, step) if begin <= end else range(begin, end - 1, -step)
    for number in way[:10_000]:
        yield f"{number:0{wide}d}" if numbers else chr(number)


def _split(inner: str) -> list[str]:
    items, begin, at = [], 0, 0
    while at < len(inner):
        if inner[at] == ",":
            items.append(inner[begin:at])
            begin = at + 1
        at = end_of_brackets(inner, at) if inner[at] == "{" and "}" in inner[at:] else end_of_part(inner, at)
    return [*items, inner[begin:]]
