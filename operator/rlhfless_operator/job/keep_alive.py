"""The time for which idle instances are kept: a duration, or `auto`."""

from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from rlhfless_functions.settings.base import format_duration, parse_duration


def parse_keep_alive(value: Any) -> Any:
    """Convert `"auto"` to None and `"15m"` to seconds; numbers pass through.

    Raises:
        ValueError: for any other string.
    """
    return None if value == "auto" else parse_duration(value)


def _format(seconds: float | None) -> str:
    return "auto" if seconds is None else format_duration(seconds)


KeepAlive = Annotated[
    float | None,
    BeforeValidator(parse_keep_alive),
    PlainSerializer(_format),
    WithJsonSchema({"type": "string", "pattern": r"^(auto|([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+)$"}),
]
"""Seconds, written `30s` or `15m`; or None, written `auto`."""
