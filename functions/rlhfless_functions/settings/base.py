"""The base of every settings model, and the field types that carry a unit in their name.

Settings are in camelCase in a job document and in a custom resource, and in snake_case in Python and on the wire. They
are frozen and strict: an unknown field is an error, and so is `"1"` in place of a number.
"""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
)
from pydantic.alias_generators import to_camel


class Experimental:
    """The mark of an option that is off by default, and has not shown a gain on its target yet.

    The option's docstring says the word, and `rlhfless validate` names the option where a document turns it on.
    """


EXPERIMENTAL = Experimental()


class Settings(BaseModel):
    """A frozen, strict model with camelCase aliases and a docstring under each field as its description."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @field_validator("*")
    @classmethod
    def _is_an_integer_of_64_bits(cls, value: Any) -> Any:
        """Refuse larger integers, which API servers do not have."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"{value} is not a 64-bit integer; write one from {-(2**63)} to {2**63 - 1}")
        return value


_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_BYTE_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")
_MONEY = re.compile(r"[0-9]+(\.[0-9]+)?")


def parse_duration(value: Any) -> Any:
    """Turn `"1h30m"` or `"500ms"` into seconds; numbers pass through.

    Raises:
        ValueError: the string is not a duration.
    """
    if not isinstance(value, str):
        return value
    if not _DURATION.fullmatch(value):
        raise ValueError(f"{value!r} is not a duration: write a number with its unit, such as 30s, 15m or 1h30m")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in _DURATION_PART.findall(value))


def format_duration(seconds: float) -> str:
    """Return the shortest exact spelling with one unit: `90.0` is `"90s"`, `600.0` is `"10m"`, `0.25` is `"250ms"`."""
    if seconds == int(seconds):
        for unit in ("d", "h", "m"):
            if seconds and seconds % _DURATION_UNITS[unit] == 0:
                return f"{int(seconds / _DURATION_UNITS[unit])}{unit}"
        return f"{int(seconds)}s"
    milliseconds = round(seconds * 1000)
    exact = milliseconds * _DURATION_UNITS["ms"] == seconds
    return f"{milliseconds}ms" if exact else f"{Decimal(repr(seconds)):f}s"


def parse_bytes(value: Any) -> Any:
    """Turn `"16Gi"` into bytes; whole numbers pass through.

    Raises:
        ValueError: the string is not an amount of memory.
    """
    if not isinstance(value, str):
        return value
    match = _BYTES.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not an amount of memory: write a number with its unit, such as 512Mi or 16Gi")
    count = Decimal(match[1]) * _BYTE_UNITS[match[2]]
    if count >= 2**63:
        raise ValueError(f"{value[:30]!r} is too much memory: write an amount such as 512Mi or 16Gi")
    return int(count)


def format_bytes(count: int) -> str:
    """Return the shortest exact spelling of an amount of memory: `2**34` is `"16Gi"`."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if count and count % _BYTE_UNITS[unit] == 0:
            return f"{count // _BYTE_UNITS[unit]}{unit}"
    return str(count)


def parse_money(value: Any) -> Any:
    """Turn `"2.50"` into an exact decimal. YAML numbers are accepted as written.

    Raises:
        ValueError: the value is not an amount of money.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    text = str(value)
    if not _MONEY.fullmatch(text):
        raise ValueError(f'{text!r} is not a price: write a decimal number such as "2.50"')
    return Decimal(text)


def format_money(amount: Decimal) -> str:
    """Return an amount as digits alone: `Decimal("0E-9")` is `"0.000000000"`."""
    return f"{amount:f}"


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise ValueError("a duration must be longer than 0s")
    return seconds


def _more_than_nothing(amount: Decimal) -> Decimal:
    if amount <= 0:
        raise ValueError('the amount must be positive; write more than "0"')
    return amount


_DURATION_SCHEMA: dict[str, Any] = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$"}

Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    AfterValidator(_positive),
    PlainSerializer(format_duration),
    WithJsonSchema({**_DURATION_SCHEMA, "allOf": [{"pattern": "[1-9]"}]}),
]
"""Seconds, written `30s`, `15m` or `1h30m`; longer than zero."""

DurationOrZero = Annotated[
    float, BeforeValidator(parse_duration), PlainSerializer(format_duration), WithJsonSchema(_DURATION_SCHEMA)
]
"""Seconds, written `30s`, `15m` or `1h30m`; `0s` is allowed."""

Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes),
    WithJsonSchema({"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"}),
]
"""Bytes, written `512Mi` or `16Gi`."""

_MONEY_SCHEMA: dict[str, Any] = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}

Money = Annotated[Decimal, BeforeValidator(parse_money), PlainSerializer(format_money), WithJsonSchema(_MONEY_SCHEMA)]
"""An exact decimal amount of money, written as a string such as `"2.50"`."""

PositiveMoney = Annotated[
    Decimal,
    BeforeValidator(parse_money),
    AfterValidator(_more_than_nothing),
    PlainSerializer(format_money),
    WithJsonSchema({**_MONEY_SCHEMA, "allOf": [{"pattern": "[1-9]"}]}),
]
"""An exact, positive amount of money, written as a string such as `"2.50"`."""
