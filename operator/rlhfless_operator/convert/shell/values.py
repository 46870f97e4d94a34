"""Variables of a script, and text that is known only when the script runs."""

import copy
import re
from dataclasses import dataclass, field

HOME = "\ue002"
"""The home folder in a text."""

_MARK = re.compile("\ue000(\\d+)\ue001")


class Unknowns:
    """Parts of texts that are known only when the script runs. A text has a mark in their place."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def add(self, reason: str) -> str:
        """Return the mark of an unknown text, of which `reason` says what it is."""
        if reason not in self._reasons:
            self._reasons.append(reason)
        return f"\ue000{self._reasons.index(reason)}\ue001"

    def reasons(self, text: str) -> list[str]:
        """Return the reasons of a text's unknown parts, without repetition; none if it is known."""
        return list(dict.fromkeys(self._reasons[int(number)] for number in _MARK.findall(text)))


class UnknownValueError(ValueError):
    """A value is known only when the script runs."""


def is_known(text: str) -> bool:
    """Return whether no part of a text is unknown."""
    return "\ue000" not in text


def plain(text: str, unknowns: Unknowns) -> str:
    """Return a text for people, with `…` for unknown parts and `~` for the home folder."""
    return _MARK.sub("…", text).replace(HOME, "~")


class Whole(list[str]):
    """Words that are not split any further, and their text where nothing is split."""

    text = ""


Value = str | list[str] | dict[str, str]
"""A variable: text, an array, or an array with names."""


@dataclass
class State:
    """Variables and arguments at a point of a script."""

    values: dict[str, Value] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)

    def copied(self) -> "State":
        """Return a copy that changes on its own."""
        return State(copy.deepcopy(self.values), list(self.arguments))

    def text(self, name: str) -> str | None:
        """Return a variable as text; None if it is not set."""
        value = self.values.get(name)
        if isinstance(value, list):
            return value[0] if value else None
        if isinstance(value, dict):
            return value.get("0")
        return value

    def items(self, name: str) -> list[str]:
        """Return all items of an array; a variable without items is one item, or none if it is not set."""
        value = self.values.get(name)
        if value is None:
            return []
        return [value] if isinstance(value, str) else list(value.values() if isinstance(value, dict) else value)


def joined(first: State, second: State, unknown: str) -> State:
    """Return the state after one of two ways through a script: variables that differ become `unknown`."""
    both = first.copied()
    for name in first.values.keys() | second.values.keys():
        if first.values.get(name) != second.values.get(name):
            both.values[name] = unknown
    if first.arguments != second.arguments:
        both.arguments = [unknown]
    return both
