"""A converted job as YAML with comments, and a table with the result for each field."""

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml

from rlhfless_operator.convert.conversion import Conversion, Left, Line, Unknown, Unneeded, Written


def job_yaml(conversion: Conversion) -> str:
    """Return the job's document. Comments give the source of each value, and the fields left to the user at the top."""
    lines = [f"# From {conversion.source}, by what its fields and its defaults mean in {conversion.peer}."]
    left = [f"{_theirs(line)}: {_note(line)}" for line in conversion.left] + _lost(conversion)
    if left:
        lines.append("# Left to you:")
        lines += [f"#   {_one_line(line)}" for line in left]
    for name, value in conversion.document.items():
        lines += _written(value, name, conversion.origins, "")
    return "\n".join(lines) + "\n"


def table(conversion: Conversion) -> str:
    """Return the result for each field of the configuration, one line each, and the defaults that were written."""
    shown = [line for line in conversion.lines if line.given or _note(line)]
    defaults = [line for line in conversion.lines if line not in shown and line.value is not None]
    rows = [(_theirs(line), _ours(line), _one_line(_note(line))) for line in shown]
    wide = [min(_WIDEST, max((len(row[column]) for row in rows), default=0)) for column in (0, 1)]
    lines = [f"{theirs:<{wide[0]}}  {ours:<{wide[1]}}  {note}".rstrip() for theirs, ours, note in rows]
    lines += [f"! {_one_line(line)}" for line in _lost(conversion)]
    if defaults:
        lines.append(f"written as the defaults of {conversion.peer}: {', '.join(_theirs(line) for line in defaults)}")
    return "\n".join(lines)


_WIDEST = 60
"""Most characters of a column that is aligned."""


_SECRETS = ("use_wandb", "logger.wandb.key", "hub_token")
"""Fields whose values are not shown."""


def _theirs(line: Line) -> str:
    return f"{line.theirs}: {'…' if line.theirs in _SECRETS else _scalar(line.value)}"


def _ours(line: Line) -> str:
    match line.outcome:
        case Unneeded():
            return "→ nothing to write"
        case Left(values=values) if not values:
            return "! left to you"
    return f"{'!' if isinstance(line.outcome, Left) else '→'} {_shown(line.outcome.values)}"


def _note(line: Line) -> str:
    return line.outcome.note if isinstance(line.outcome, Written) else line.outcome.reason


def _shown(values: dict[str, Any]) -> str:
    return ", ".join(f"{path}: {_scalar(value)}" for path, value in values.items())


def _lost(conversion: Conversion) -> list[str]:
    return [f"{what}: {reason}" for what, reason in conversion.lost.items()]


def _one_line(text: str) -> str:
    """Return a text for a comment, in which line breaks and control characters have no meaning."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


class _Dumper(yaml.SafeDumper):
    """YAML in which each scalar is one line, and aliases are written out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NUMBER_ELSEWHERE = re.compile(r"[-+.]?\d[^/]*|[yYnN]")
"""Text that PyYAML writes plainly, and that others may read as a number or as true or false."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = '"' if not value.isprintable() else "'" if _NUMBER_ELSEWHERE.fullmatch(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(Unknown, lambda dumper, value: _text(dumper, value.text))


def _scalar(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=math.inf, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("\n...")


def _written(value: Any, path: str, origins: dict[str, str], indent: str) -> Iterator[str]:
    """Return the lines of one field, with a comment on the source of its value, or of all values below it."""
    name = path.rpartition(".")[2]
    comment = f"  # {origins[path]}" if path in origins else ""
    if isinstance(value, dict) and value and path not in origins:
        yield f"{indent}{name}:"
        for inner, content in value.items():
            yield from _written(content, f"{path}.{inner}", origins, f"{indent}  ")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"{indent}{name}:{comment}"
        yield from (f"{indent}  - {_scalar(item)}" for item in value)
    else:
        yield f"{indent}{name}: {_scalar(value)}{comment}"
