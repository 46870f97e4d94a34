"""Arithmetic as in `$((...))`: whole numbers of 64 bits."""

import re
from collections.abc import Callable, Iterator

from rlhfless_operator.convert.shell.values import UnknownValueError

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+#[0-9A-Za-z@_]+|0[xX][0-9a-fA-F]+|\d+)|(?P<name>[A-Za-z_]\w*(?:\[[^\]]*\])?)"
    r"|(?P<operator>\*\*|<<=|>>=|[-+*/%&|^]=|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>=!~&|^?:(),]))",
    re.ASCII,
)
_LEFT = {
    "||": 3, "&&": 4, "|": 5, "^": 6, "&": 7, "==": 8, "!=": 8, "<": 9, ">": 9, "<=": 9, ">=": 9, "<<": 10, ">>": 10,
    "+": 11, "-": 11, "*": 12, "/": 12, "%": 12,
}  # fmt: skip
_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=")

Read = Callable[[str], str]
"""The text of a variable."""
Write = Callable[[str, str], None]
"""Sets a variable."""


def calculate(text: str, read: Read, write: Write) -> int:
    """Return the value of an expression whose `$` are expanded.

    Raises:
        UnknownValueError: it is no arithmetic, or divides by zero.
    """
    return _Expression(text, read, write, 0).value() if text.strip() else 0


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, text = 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise UnknownValueError(f"{text} is no arithmetic")
        yield match.lastgroup, match[match.lastgroup]
        at = match.end()
    yield "end", ""


class _Expression:
    def __init__(self, text: str, read: Read, write: Write, depth: int) -> None:
        self._text, self._read, self._write, self._depth = text, read, write, depth
        self._tokens = list(_tokens(text))
        self._at = 0
        self._skipped = 0
        """Number of operators around this place that leave their operand without effect."""

    def value(self) -> int:
        value = self._comma()
        if self._kind() != "end":
            raise self._wrong()
        return value

    def _wrong(self) -> UnknownValueError:
        return UnknownValueError(f"{self._text.strip()} is no arithmetic that can be computed")

    def _kind(self) -> str:
        return self._tokens[self._at][0]

    def _operator(self, *allowed: str) -> str | None:
        kind, token = self._tokens[self._at]
        if kind != "operator" or token not in allowed:
            return None
        self._at += 1
        return token

    def _comma(self) -> int:
        value = self._assignment()
        while self._operator(","):
            value = self._assignment()
        return value

    def _assignment(self) -> int:
        kind, name = self._tokens[self._at]
        if kind == "name" and self._tokens[self._at + 1] in [("operator", each) for each in _ASSIGNMENTS]:
            operator = self._tokens[self._at + 1][1]
            self._at += 2
            value = self._assignment()
            if operator != "=":
                value = self._binary(operator[:-1], self._variable(name), value)
            self._set(name, value)
            return value
        return self._choice()

    def _choice(self) -> int:
        condition = self._level(3)
        if not self._operator("?"):
            return condition
        first = self._aside(self._comma, skip=not condition)
        if not self._operator(":"):
            raise self._wrong()
        second = self._aside(self._assignment, skip=bool(condition))
        return first if condition else second

    def _aside(self, part: Callable[[], int], *, skip: bool) -> int:
        self._skipped += skip
        value = part()
        self._skipped -= skip
        return value

    def _level(self, lowest: int) -> int:
        left = self._power()
        while self._kind() == "operator" and _LEFT.get(operator := self._tokens[self._at][1], 0) >= lowest:
            self._at += 1
            level = _LEFT[operator]
            skip = (operator == "&&" and not left) or (operator == "||" and bool(left))
            right = self._aside(lambda level=level: self._level(level + 1), skip=skip)  # type: ignore[misc]
            left = self._binary(operator, left, right)
        return left

    def _power(self) -> int:
        base = self._unary()
        if not self._operator("**"):
            return base
        exponent = self._power()
        if exponent < 0 or exponent > 64 * 64:
            raise self._wrong()
        return _wrapped(base**exponent)

    def _unary(self) -> int:
        if (step := self._operator("++", "--")) is not None:
            kind, name = self._tokens[self._at]
            if kind != "name":
                raise self._wrong()
            self._at += 1
            return self._set(name, self._variable(name) + (1 if step == "++" else -1))
        if (operator := self._operator("-", "+", "!", "~")) is not None:
            value = self._unary()
            return _wrapped({"-": -value, "+": value, "!": int(not value), "~": ~value}[operator])
        return self._atom()

    def _atom(self) -> int:
        kind, token = self._tokens[self._at]
        if self._operator("("):
            value = self._comma()
            if not self._operator(")"):
                raise self._wrong()
            return value
        self._at += 1
        if kind == "number":
            return self._number(token)
        if kind != "name":
            raise self._wrong()
        value = self._variable(token)
        if (step := self._operator("++", "--")) is not None:
            self._set(token, value + (1 if step == "++" else -1))
        return value

    def _number(self, token: str) -> int:
        base, mark, digits = token.partition("#")
        try:
            if mark:
                return int(digits, int(base))
            return int(token, 16 if token[:2] in ("0x", "0X") else 8 if token.startswith("0") else 10)
        except ValueError:
            raise self._wrong() from None

    def _variable(self, name: str) -> int:
        if self._skipped:
            return 0
        text = self._read(name)
        if self._depth > 20:
            raise self._wrong()
        return _Expression(text, self._read, self._write, self._depth + 1).value() if text.strip() else 0

    def _set(self, name: str, value: int) -> int:
        if not self._skipped:
            self._write(name, str(_wrapped(value)))
        return _wrapped(value)

    def _binary(self, operator: str, left: int, right: int) -> int:
        if operator in ("/", "%"):
            if self._skipped:
                return 0
            if not right:
                raise UnknownValueError(f"{self._text.strip()} divides by zero")
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return _wrapped(quotient if operator == "/" else left - quotient * right)
        if operator in ("<<", ">>"):
            return _wrapped(left << (right & 63) if operator == "<<" else left >> (right & 63))
        return _wrapped(
            {
                "||": int(bool(left or right)), "&&": int(bool(left and right)), "|": left | right, "^": left ^ right,
                "&": left & right, "==": int(left == right), "!=": int(left != right), "<": int(left < right),
                ">": int(left > right), "<=": int(left <= right), ">=": int(left >= right), "+": left + right,
                "-": left - right, "*": left * right,
            }[operator]
        )  # fmt: skip


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
