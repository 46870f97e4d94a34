"""Assignments, and bash's own commands that change variables."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhfless_operator.convert.shell.patterns import expand_braces
from rlhfless_operator.convert.shell.scanning import end_of_word
from rlhfless_operator.convert.shell.values import UnknownValueError, Value

if TYPE_CHECKING:
    from rlhfless_operator.convert.shell.evaluation import Shell

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]=]*)\])?(\+?)=", re.ASCII)


def assign(shell: "Shell", found: re.Match[str], word: str, *, named: bool = False) -> None:
    """Follow `NAME=...`, `NAME+=...`, `NAME=(...)` or `NAME[i]=...`.

    Args:
        found: the match of its begin.
        named: whether an array has names for its items.
    """
    name, index, more = found[1], found[2], bool(found[3])
    values, right = shell.state.values, word[found.end() :]
    before = values.get(name)
    if right.startswith("(") and index is None:
        values[name] = _array(shell, right[1:-1], before if more else None, named=named or isinstance(before, dict))
        return
    text = shell.words.text(right)
    if index is not None:
        _assign_item(shell, name, index, text, more=more)
    elif not more:
        values[name] = text
    elif isinstance(before, list):
        values[name] = [(before or [""])[0] + text, *before[1:]]
    else:
        old = before if isinstance(before, str) else ""
        values[name] = str(_number(shell, old) + _number(shell, text)) if name in shell.numbers else old + text


def _number(shell: "Shell", text: str) -> int:
    try:
        return shell.words.number(text)
    except UnknownValueError:
        return 0


def _assign_item(shell: "Shell", name: str, index: str, text: str, *, more: bool) -> None:
    values = shell.state.values
    before = values.setdefault(name, [])
    if isinstance(before, dict):
        key = shell.words.text(index)
        before[key] = (before.get(key, "") if more else "") + text
        return
    items = [before] if isinstance(before, str) else before
    try:
        place = shell.words.number(index)
    except UnknownValueError as error:
        values[name] = shell.unknowns.add(str(error))
        return
    items += [""] * (place + 1 - len(items))
    items[place] = (items[place] if more else "") + text
    values[name] = items


def _array(shell: "Shell", inner: str, before: Value | None, *, named: bool) -> Value:
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
                old[shell.words.text(pair[1])] = shell.words.text(word[pair.end() :])
        return old
    items = [before] if isinstance(before, str) else list(before or [])
    return items + [field for word in words for field in shell.words.fields(word)]


def _declare(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    """Follow `export`, `declare`, `local` and `readonly`, whose arguments are assignments."""
    flags = "".join(word for word in words[1:] if word.startswith("-"))
    for word in words[1:]:
        found = ASSIGNMENT.match(word)
        name = found[1] if found is not None else word
        if fields[0] == "local" and shell.locals:
            shell.locals[-1].setdefault(name, shell.state.values.get(name))
        if "i" in flags:
            shell.numbers.add(name)
        if found is None:
            if "A" in flags and name.isidentifier():
                shell.state.values[name] = {}
            continue
        (one,) = expand_braces(word)[:1]
        assign(shell, found, one if one.startswith(found[0] + "(") else word, named="A" in flags)
    return True


def _unset(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    for name in fields[1:]:
        shell.state.values.pop(name, None)
    return True


def _shift(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    count = int(fields[1]) if fields[1:] and fields[1].isdigit() else 1
    if len(shell.state.arguments) < count:
        return False
    shell.state.arguments = shell.state.arguments[count:]
    return True


def _let(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    status: bool | None = True
    for text in fields[1:]:
        status = shell.calculated(text)
    return status


def _eval(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    shell.evaluate_text(" ".join(fields[1:]))
    return None


def _read(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    """Follow `read`, `mapfile` and `readarray`, which set variables to something unknown."""
    for name in fields[1:]:
        if name.isidentifier():
            shell.state.values[name] = shell.unknowns.add(f"{fields[0]} reads {name}")
    return None


def _set(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    if "--" in fields:
        shell.state.arguments = fields[fields.index("--") + 1 :]
    return True


def _source(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    shell.sourced.append(" ".join(fields))
    return None


def _true(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    return True


def _false(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    return False


def _unknown(shell: "Shell", words: list[str], fields: list[str]) -> bool | None:
    return None


BUILTINS: dict[str, Callable[["Shell", list[str], list[str]], bool | None]] = {
    **dict.fromkeys(("export", "declare", "typeset", "local", "readonly"), _declare),
    **dict.fromkeys(("read", "mapfile", "readarray"), _read),
    **dict.fromkeys((":", "true"), _true),
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("cd", "pushd", "popd", "trap", "ulimit", "umask", "wait", "hash", "type"), _unknown),
    "unset": _unset,
    "shift": _shift,
    "let": _let,
    "eval": _eval,
    "set": _set,
    "shopt": _true,
    "getopts": _false,
    "false": _false,
}
"""Commands of bash itself, by name. Each returns whether it succeeds; None where only a run can tell."""
