"""A checksum of a whole file in the file itself: no byte of it changes unseen.

The checksum is that of all bytes, with zeros in its own place. Its place is found by the words before it. A file
without these words is taken as it is: somebody else wrote it, or the damage is in the words and nowhere else.
"""

import json
import re
from typing import Any

import xxhash

KEY = "checksum"
"""Name of the checksum, in a JSON object or in the metadata of a Parquet file."""
_WORDS = b"xxh3-128:"
_DIGITS = 32
_AT_END = re.compile(rb'"xxh3-128:[0-9a-f]{32}"\s*}\s*$')
BLANK = f"{_WORDS.decode()}{'0' * _DIGITS}"
"""Checksum of a file that is not sealed yet."""


def seal(content: bytes) -> bytes:
    """Put the checksum of a content in the place of its last blank one.

    Raises:
        ValueError: it has no blank one.
    """
    place = content.rindex(BLANK.encode()) + len(_WORDS)
    return content[:place] + _digest(content) + content[place + _DIGITS :]


def is_sound(content: bytes) -> bool:
    """Return whether a content has its checksum, or none at all."""
    place = content.rfind(_WORDS)
    if place < 0:
        return True
    place += len(_WORDS)
    blank = content[:place] + b"0" * _DIGITS + content[place + _DIGITS :]
    return content[place : place + _DIGITS] == _digest(blank)


def sealed_json(value: Any) -> bytes:
    """Return a value in JSON; an object with its checksum as the last key."""
    if not isinstance(value, dict):
        return json.dumps(value).encode()
    return seal(json.dumps({**value, KEY: BLANK}).encode())


def parse_sealed(content: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or not the text that was written.
    """
    value = json.loads(content)
    if isinstance(value, dict) and KEY not in value and _AT_END.search(content):
        raise ValueError("the name of its checksum has changed since it was written")
    if not isinstance(value, dict) or KEY not in value:
        return value
    if not is_sound(content):
        raise ValueError("its checksum is another: some of it has changed since it was written")
    del value[KEY]
    return value


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(content).encode()
