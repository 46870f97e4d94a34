"""The conditions `[ ... ]` and `[[ ... ]]`: true, false, or None where only a run can tell."""

import re
from collections.abc import Sequence

from rlhfless_operator.convert.shell.patterns import regular_expression
from rlhfless_operator.convert.shell.values import UnknownValueError, is_known
from rlhfless_operator.convert.shell.words import Words

_COMPARED = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b, "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip
_TEXTS = ("=", "==", "!=", "<", ">", "=~")


def holds(words: Sequence[str], expand: Words, *, double: bool) -> bool | None:
    """Return whether a condition holds.

    Args:
        words: its words without brackets, as they are written.
        double: whether it is in double brackets, where the right side of `==` is a pattern.
    """
    before = expand.unset_is_empty
    expand.unset_is_empty = True
    try:
        found = _Reader(list(words), expand, double=double)
        value = found.either()
        return value if found.at_end() else None
    except UnknownValueError:
        return None
    finally:
        expand.unset_is_empty = before


def negated(value: bool | None) -> bool | None:
    """Return the opposite, as far as it is known."""
    return None if value is None else not value


def both(first: bool | None, second: bool | None) -> bool | None:
    """Return whether two conditions hold."""
    if first is False or second is False:
        return False
    return None if first is None or second is None else True


class _Reader:
    def __init__(self, words: list[str], expand: Words, *, double: bool) -> None:
        self._expand, self._double = expand, double
        # In single brackets words are split, as those of a command; operators are not words to expand.
        self._words = words if double else [field for word in words for field in expand.fields(word)]
        self._at = 0

    def at_end(self) -> bool:
        return self._at >= len(self._words)

    def _peek(self, ahead: int = 0) -> str:
        place = self._at + ahead
        return self._words[place] if place < len(self._words) else ""

    def _take(self, *allowed: str) -> bool:
        if self.at_end() or self._peek() not in allowed:
            return False
        self._at += 1
        return True

    def either(self) -> bool | None:
        value = self._all()
        while self._take("||", "-o"):
            value = negated(both(negated(value), negated(self._all())))
        return value

    def _all(self) -> bool | None:
        value = self._one()
        while self._take("&&", "-a"):
            value = both(value, self._one())
        return value

    def _text(self) -> str:
        word = self._peek()
        self._at += 1
        return self._expand.text(word) if self._double else word

    def _one(self) -> bool | None:
        left = len(self._words) - self._at
        if left > 1 and self._take("!"):
            return negated(self._one())
        if left > 2 and self._peek(1) not in (*_TEXTS, *_COMPARED) and self._take("("):
            value = self.either()
            self._take(")")
            return value
        if left > 2 and self._peek(1) in (*_TEXTS, *_COMPARED):
            return self._compared()
        if left > 1 and re.fullmatch(r"-[a-zA-Z]", self._peek()):
            return self._unary()
        if left < 1:
            return False
        text = self._text()
        return bool(text) if is_known(text) else None

    def _unary(self) -> bool | None:
        operator = self._peek()
        self._at += 1
        text = self._text()
        if not is_known(text):
            return None
        if operator in ("-z", "-n"):
            return (text == "") == (operator == "-z")
        if operator == "-v":
            return text in self._expand.state.values
        return None

    def _compared(self) -> bool | None:
        left = self._text()
        operator, right = self._peek(), self._peek(1)
        self._at += 2
        if operator in _COMPARED:
            if not self._double and not all(re.fullmatch(r"\s*[-+]?\d+\s*", each) for each in (left, right)):
                return None
            right = self._expand.text(right) if self._double else right
            return bool(_COMPARED[operator](self._expand.number(left), self._expand.number(right)))
        pattern = self._expand.pattern(right) if self._double else right
        if not is_known(left) or not is_known(pattern):
            return None
        if operator in ("<", ">"):
            return left < pattern if operator == "<" else left > pattern
        if operator == "=~":
            return _found(pattern, left)
        same = bool(re.fullmatch(regular_expression(pattern), left, re.DOTALL)) if self._double else left == right
        return same == (operator != "!=")


def _found(pattern: str, text: str) -> bool | None:
    if re.search(r"[\\(]|\[:", pattern):
        return None  # bash's regular expressions differ from Python's there
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None
