"""How a table of a peer's fields, a row each, makes a job of its configuration: pure functions."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rlhfless_operator.job.spec import API_VERSION, KIND


@dataclass(frozen=True)
class Written:
    """A field of theirs that a job has."""

    values: dict[str, Any]
    """Our fields, with dots, and what to write; from `spec` on, or from `metadata`."""
    note: str = ""
    """How the value came about, or what differs."""


@dataclass(frozen=True)
class Unneeded:
    """A field of theirs that a job means the same without."""

    reason: str


@dataclass(frozen=True)
class Left:
    """A field of theirs that was not converted: somebody has to look."""

    reason: str
    values: dict[str, Any] = field(default_factory=dict)
    """What is written in its place, to make the job a valid one."""


Outcome = Written | Unneeded | Left | None
"""What becomes of a field; None where its value asks for nothing."""


class Theirs:
    """A peer's configuration, with its own defaults for what it leaves out.

    Args:
        given: what it says, by name.
        defaults: by name.
        processes: that it is run with.
        name: of its file, without the ending.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], processes: int, name: str) -> None:
        self.given = given
        self.processes = processes
        self.name = name
        self._defaults = defaults

    def __getitem__(self, name: str) -> Any:
        return self.given[name] if name in self.given else self._defaults[name]

    def number(self, name: str) -> float:
        """A field as a number; YAML of other tools may hold `1e-6`, which PyYAML takes for text.

        Raises:
            ValueError: it is none.
        """
        value = self[name]
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{name} is {value!r}, which is no number") from None

    def whole(self, name: str) -> int:
        """A field as a whole number.

        Raises:
            ValueError: it is none.
        """
        number = self.number(name)
        if number != int(number):
            raise ValueError(f"{name} is {self[name]!r}, which is no whole number")
        return int(number)


@dataclass(frozen=True)
class Row:
    """One field of a peer's."""

    default: Any
    """Its value where a configuration leaves it out."""
    convert: Callable[[Any, Theirs], Outcome]
    """What becomes of a value."""
    also: tuple[str, ...] = ()
    """Other fields that it is made of, which have rows of their own."""


@dataclass(frozen=True)
class Line:
    """What became of one field: a line of the report."""

    theirs: str
    value: Any
    outcome: Written | Unneeded | Left
    given: bool
    """Whether the configuration has the field, rather than its peer a default."""


@dataclass(frozen=True)
class Conversion:
    """A job from a peer's configuration."""

    peer: str
    """Whose, with the release that the defaults are of."""
    source: str
    """Name of the file."""
    document: dict[str, Any]
    origins: dict[str, str]
    """Of which field of theirs each of ours is made."""
    lines: list[Line]

    @property
    def left(self) -> list[Line]:
        """What somebody has to look at."""
        return [line for line in self.lines if isinstance(line.outcome, Left)]


def convert_rows(
    peer: str, source: str, rows: Mapping[str, Row], given: Mapping[str, Any], processes: int = 1
) -> Conversion:
    """Convert a configuration by its peer's table.

    Args:
        peer: whose it is.
        source: name of its file.
        rows: the table.
        given: what the configuration says; names that the table lacks are left.
        processes: that it is launched with, where its numbers are of a process.
    """
    theirs = Theirs(given, {name: row.default for name, row in rows.items()}, processes, PurePosixPath(source).stem)
    lines = [line for name, row in rows.items() if (line := _line(name, row, theirs)) is not None]
    unknown = Left(f"{peer} knows no such field")
    lines += [Line(name, value, unknown, True) for name, value in given.items() if name not in rows]
    # What stands for another's row is not said to be a part of it.
    shown = {line.theirs for line in lines if not isinstance(line.outcome, Unneeded)}
    lines = [line for line in lines if not (isinstance(line.outcome, Unneeded) and line.theirs in shown)]
    document: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {}, "spec": {}}
    origins: dict[str, str] = {}
    for line in lines:
        for path, value in ({} if isinstance(line.outcome, Unneeded) else line.outcome.values).items():
            _put(document, path, value)
            origins[path] = line.theirs if line.given else f"{peer.split()[0]}'s default"
    document["spec"] = {name: document["spec"][name] for name in sorted(document["spec"], key=_place)}
    return Conversion(peer, source, document, origins, lines)


def _line(name: str, row: Row, theirs: Theirs) -> Line | None:
    named = [one for one in (name, *row.also) if one in theirs.given]
    try:
        outcome = row.convert(theirs[name], theirs)
    except (ValueError, TypeError) as error:
        outcome = Left(str(error))
    if outcome is None and name in theirs.given:
        outcome = Unneeded("it asks for nothing that a job does not do")
    if outcome is None or (isinstance(outcome, Unneeded) and name not in theirs.given):
        return None
    shown = named[0] if named else name
    return Line(shown, theirs[shown], outcome, bool(named))


_ORDER = ("model", "data", "rewards", "algorithm", "sampling", "batch", "optimizer", "steps", "epochs", "seed")


def _place(section: str) -> int:
    return _ORDER.index(section) if section in _ORDER else len(_ORDER)


def _put(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place = document if parents[0] == "metadata" else document["spec"]
    for parent in parents if parents[0] == "metadata" else parents[1:]:
        place = place.setdefault(parent, {})
    place[last] = value


# --- conversions that both peers' tables use ---


def to(*ours: str, kind: Callable[[Any], Any] | None = None) -> Callable[[Any, Theirs], Outcome]:
    """The same value under our names; nothing where it is null."""

    def convert(value: Any, theirs: Theirs) -> Outcome:
        if value is None:
            return None
        return Written({f"spec.{name}": value if kind is None else kind(value) for name in ours})

    return convert


def number(value: Any) -> float:
    """A number, also one such as `1e-6` that PyYAML took for text."""
    return float(value)


def one_of(
    ours: str, meanings: Mapping[Any, Any], otherwise: str, instead: Any = None
) -> Callable[[Any, Theirs], Outcome]:
    """A choice by its name there.

    Args:
        ours: our field.
        meanings: our value for each of theirs.
        otherwise: why other values have none.
        instead: what is written in their place.
    """

    def convert(value: Any, theirs: Theirs) -> Outcome:
        if value in meanings:
            return Written({f"spec.{ours}": meanings[value]})
        return Left(f"{value}: {otherwise}", {} if instead is None else {f"spec.{ours}": instead})

    return convert


def unneeded(reason: str) -> Callable[[Any, Theirs], Outcome]:
    """A field of theirs that changes nothing in a job, at any value."""
    return lambda value, theirs: Unneeded(reason)


def without(reason: str, *harmless: Any) -> Callable[[Any, Theirs], Outcome]:
    """A field without a counterpart, unless its value asks for nothing: null, or one of `harmless`."""
    return lambda value, theirs: None if value is None or value in harmless else Left(reason)


def part_of(ours: str) -> Callable[[Any, Theirs], Outcome]:
    """A field that another row reads."""
    return lambda value, theirs: Unneeded(f"part of {ours}")


def job_name(text: str) -> str:
    """A name that a job may have."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:53].strip("-") or "job"


def share(whole: int, part: int, what: str) -> int:
    """How often `part` goes into `whole`.

    Raises:
        ValueError: it does not go into it evenly.
    """
    if part < 1 or whole % part:
        raise ValueError(f"{what}: {whole} is no multiple of {part}")
    return whole // part


def round_up(value: float) -> int:
    """The next whole number, with room for the last bits of a product such as 0.1 × 30."""
    return math.ceil(value - 1e-9)
