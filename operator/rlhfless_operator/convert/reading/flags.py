"""Fields on a command line as `--name value`, of TRL and of OpenRLHF."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rlhfless_operator.convert.reading.fields import value_of
from rlhfless_operator.convert.shell import Unknowns
from rlhfless_operator.convert.shell.values import is_known, plain

_FLAG = re.compile(r"--?([A-Za-z_][\w.-]*)(?:=(.*))?", re.DOTALL)


def read_flags(words: Sequence[str], unknowns: Unknowns) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields that flags set, and what was not read, with the reason.

    A flag with several words is a list, and one without a word is true, as for argparse.
    """
    fields: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for flag, values in _groups(words):
        if flag is None:
            for word in values:
                reasons = unknowns.reasons(word)
                why = (
                    f"it is known only when the script runs: {'; '.join(reasons)}" if reasons else "it follows no flag"
                )
                lost[plain(word, unknowns)] = why
            continue
        name = flag.replace("-", "_")
        read = [value_of(value, unknowns) for value in values]
        fields[name] = True if not read else read[0] if len(read) == 1 else read
    return fields, lost


def _groups(words: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    flag: str | None = None
    values: list[str] = []
    for word in words:
        match = _FLAG.fullmatch(word)
        if match is None and (is_known(word) or flag is not None):
            values.append(word)
            continue
        if flag is not None or values:
            yield flag, values
        flag, values = (match[1], []) if match is not None else (None, [word])
        if match is not None and match[2] is not None:
            yield flag, [match[2]]
            flag = None
    if flag is not None or values:
        yield flag, values
