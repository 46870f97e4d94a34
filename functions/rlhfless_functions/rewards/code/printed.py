"""Compares what a program printed with what it should print."""

import math
import re
from itertools import dropwhile

_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][-+]?\d+|\d*\.\d+[eE][-+]?\d+)")
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


def same_output(said: str, wanted: str) -> bool:
    """Return whether an output is right.

    Lines must be equal but for white space at their ends, and for empty lines before the first and after the last. If
    the wanted output has numbers with a decimal point, as many words must be equal instead, and such numbers may differ
    by a millionth, relative, or 1e-9.
    """
    if _lines(said) == _lines(wanted):
        return True
    words, others = said.split(), wanted.split()
    return (
        len(words) == len(others)
        and any(map(_FLOAT.fullmatch, others))
        and all(map(_same_word, words, others))
        and [len(line.split()) for line in _lines(said)] == [len(line.split()) for line in _lines(wanted)]
    )


def _same_word(said: str, wanted: str) -> bool:
    if said == wanted:
        return True
    if not _FLOAT.fullmatch(wanted):
        return False
    try:
        return math.isclose(float(said), float(wanted), rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except ValueError:
        return False


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    return list(dropwhile(lambda line: not line, lines))
