"""Assignments, and bash's own commands that change variables."""

import re
from collections.abc import Callable

from rlhfless_operator.convert.shell.patterns import expand_braces
from rlhfless_operator.convert.shell.scanning import end_of_word
from rlhfless_operator.convert.shell.values import UnknownValueError, Value
from rlhfless_operator.convert.shell.variables import Variables

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]=]*)\])?(\+?)=", re.ASCII)


def assign(variables: Variables, found: re.Match[str], word: str, *, named: bool = False) -> None:
    """Follow `NAME=...`, `NAME+=...`, `NAME=(...)` or `NAME[i]=...`.

    Args:
        found: the match of its begin.
        named: whether an array has names for its items.
    """
    name, index, more = found[1], found[2], bool(found[3])
    values, right = variables.state.values, word[found.end() :]
    before = values.get(name)
    if right.startswith("(") and index is None:
        values[name] = _array(variables, right[1:-1], before if more else None, named=named or isinstance(before, dict))
        return
    text = variables.words.text(right)
    if index is not None:
        _assign_item(variables, name, index, text, more=more)
    elif not more:
        values[name] = text
    elif isinstance(before, list):
        values[name] = [(before or [""])[0] + text, *before[1:]]
    else:
        old = before if isinstance(before, str) else ""
        is_number = name in variables.numbers
        values[name] = str(_number(variables, old) + _number(variables, text)) if is_number else old + text


def _number(variables: Variables, text: str) -> int:
    try:
        return variables.words.number(text)
    except UnknownValueError:
        return 0


def _assign_item(variables: Variables, name: str, index: str, text: str, *, more: bool) -> None:
    values = variables.state.values
    before = values.setdefault(name, [])
    if isinstance(before, dict):
        key = variables.words.text(index)
        before[key] = (before.get(key, "") if more else "") + text
        return
    items = [before] if isinstance(before, str) else before
    try:
        place = variables.words.number(index)
    except UnknownValueError as error:
        values[name] = variables.unknowns.add(str(error))
        return
    items += [""] * (place + 1 - len(items))
    items[place] = (items[place] if more else "") + text
    values[name] = items


def _array(variables: Variables, inner: str, before: Value | None, *, named: bool) -> Value:
    words, at = [], 0
    while at < len(inner):
        if inner[at] in " \t\n":
            at += 1
        elif inner.startswith("\\\n", at):
            at += 2
        elif inner[at] == "#":
            at = (inner + "\n").index("\n", at)
        else:
            end = max(end_of_word(inner, at), at + 1)
            words.append(inner[at:end])
            at = end
    pairs = [re.match(r"\[([^\]]*)\]=", word) for word in words]
    if named:
        old = dict(before) if isinstance(before, dict) else {}
        for pair, word in zip(pairs, words, strict=True):
            if pair is not None:
                old[variables.words.text(pair[1])] = variables.words.text(word[pair.end() :])
        return old
    items = [before] if isinstance(before, str) else list(before or [])
    return items + [field for word in words for field in variables.words.fields(word)]


def _declare(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    """Follow `export`, `declare`, `local` and `readonly`, whose arguments are assignments."""
    flags = "".join(word for word in words[1:] if word.startswith("-"))
    for word in words[1:]:
        found = ASSIGNMENT.match(word)
        name = found[1] if found is not None else word
        if fields[0] == "local" and variables.locals:
            variables.locals[-1].setdefault(name, variables.state.values.get(name))
        if "i" in flags:
            variables.numbers.add(name)
        if found is None:
            if "A" in flags and name.isidentifier():
                variables.state.values[name] = {}
            continue
        (one,) = expand_braces(word)[:1]
        assign(variables, found, one if one.startswith(found[0] + "(") else word, named="A" in flags)
    return True


def _unset(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    for name in fields[1:]:
        variables.state.values.pop(name, None)
    return True


def _shift(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    count = int(fields[1]) if fields[1:] and fields[1].isdigit() else 1
    if len(variables.state.arguments) < count:
        return False
    variables.state.arguments = variables.state.arguments[count:]
    return True


def _let(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    status: bool | None = True
    for text in fields[1:]:
        status = variables.calculated(text)
    return status


def _read(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    """Follow `read`, `mapfile` and `readarray`, which set variables to something unknown."""
    for name in fields[1:]:
        if name.isidentifier():
            variables.state.values[name] = variables.unknowns.add(f"{fields[0]} reads {name}")
    return None


def _set(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    if "--" in fields:
        variables.state.arguments = fields[fields.index("--") + 1 :]
    return True


def _source(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    variables.sourced.append(" ".join(fields))
    return None


def _true(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    return True


def _false(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    return False


def _unknown(variables: Variables, words: list[str], fields: list[str]) -> bool | None:
    return None


BUILTINS: dict[str, Callable[[Variables, list[str], list[str]], bool | None]] = {
    **dict.fromkeys(("export", "declare", "typeset", "local", "readonly"), _declare),
    **dict.fromkeys(("read", "mapfile", "readarray"), _read),
    **dict.fromkeys((":", "true"), _true),
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("cd", "pushd", "popd", "trap", "ulimit", "umask", "wait", "hash", "type"), _unknown),
    "unset": _unset,
    "shift": _shift,
    "let": _let,
    "set": _set,
    "shopt": _true,
    "getopts": _false,
    "false": _false,
}
"""Commands of bash itself, by name. Each returns whether it succeeds; None where only a run can tell."""
