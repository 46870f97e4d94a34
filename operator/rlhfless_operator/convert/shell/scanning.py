"""The ends of quoted parts and of expansions in a shell script."""

import re

_NAMED = re.compile(r"\$(?:[A-Za-z_]\w*|\d|[@*#?$!-])", re.ASCII)


class ShellSyntaxError(ValueError):
    """The script is not complete, or has syntax that is not read.

    Args:
        line: line of the script, counted from 1.
        problem: the problem, as a phrase.
    """

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")


METACHARACTERS = " \t\n;&|<>()"
"""Characters that end a word outside of quotes."""


def end_of_part(text: str, at: int) -> int:
    """Return the end of the part of a word that begins at `at`: a quoted string, an expansion, or one character.

    Raises:
        ShellSyntaxError: it does not end.
    """
    if text[at] == "\\":
        return min(at + 2, len(text))
    if text[at] == "'":
        return _after(text, at, "'", at + 1)
    if text[at] == '"':
        return _end_of_double(text, at)
    if text[at] == "`":
        return _end_of_backticks(text, at)
    if text.startswith("$'", at):
        return _end_of_escapes(text, at)
    if text.startswith('$"', at):
        return _end_of_double(text, at + 1)
    if text.startswith(("$(", "${", "$["), at):
        return end_of_brackets(text, at + 1)
    if text.startswith(("<(", ">("), at):
        return end_of_brackets(text, at + 1)
    return named.end() if (named := _NAMED.match(text, at)) is not None else at + 1


def end_of_brackets(text: str, at: int) -> int:
    """Return the end of what the bracket at `at` opens, quotes respected.

    Raises:
        ShellSyntaxError: it does not end.
    """
    opening, closing = text[at], {"(": ")", "{": "}", "[": "]"}[text[at]]
    place, depth = at + 1, 1
    while place < len(text):
        if text[place] == opening:
            depth, place = depth + 1, place + 1
        elif text[place] == closing:
            depth, place = depth - 1, place + 1
            if not depth:
                return place
        elif text[place] == "#" and opening == "(" and text[place - 1] in " \t\n":
            place = (text + "\n").index("\n", place)
        else:
            place = end_of_part(text, place)
    raise ShellSyntaxError(line_of(text, at), f"{opening} is not closed")


def end_of_word(text: str, at: int) -> int:
    """Return the end of the word that begins at `at`. An array of an assignment is a part of its word."""
    begin = at
    while at < len(text) and (text[at] not in METACHARACTERS or text.startswith(("<(", ">("), at)):
        at = end_of_part(text, at)
        if text[at - 1] == "=" and text.startswith("(", at) and _is_name(text[begin : at - 1].removesuffix("+")):
            return end_of_brackets(text, at)
    return at


def line_of(text: str, at: int) -> int:
    """Return the line of a place, counted from 1."""
    return text.count("\n", 0, at) + 1


def _is_name(text: str) -> bool:
    return text.isidentifier() and text.isascii()


def _after(text: str, at: int, mark: str, place: int) -> int:
    found = text.find(mark, place)
    if found < 0:
        raise ShellSyntaxError(line_of(text, at), f"{mark} is not closed")
    return found + len(mark)


def _end_of_double(text: str, at: int) -> int:
    place = at + 1
    while place < len(text):
        if text[place] == '"':
            return place + 1
        inner = text[place] in "\\`" or text.startswith(("$(", "${", "$["), place)
        place = end_of_part(text, place) if inner else place + 1
    raise ShellSyntaxError(line_of(text, at), '" is not closed')


def _end_of_backticks(text: str, at: int) -> int:
    place = at + 1
    while place < len(text):
        if text[place] == "`":
            return place + 1
        place += 2 if text[place] == "\\" else 1
    raise ShellSyntaxError(line_of(text, at), "` is not closed")


def _end_of_escapes(text: str, at: int) -> int:
    place = at + 2
    while place < len(text):
        if text[place] == "'":
            return place + 1
        place += 2 if text[place] == "\\" else 1
    raise ShellSyntaxError(line_of(text, at), "' is not closed")
