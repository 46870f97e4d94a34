"""Convert a peer's configuration to a job, by a table with a row for each of its fields: pure functions."""

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rlhfless_operator.job.reading.familiar_names import our_field
from rlhfless_operator.job.reading.fields import walk
from rlhfless_operator.job.reading.validation import Fault, InvalidJobError, parse_content
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob


@dataclass(frozen=True)
class Written:
    """A peer's field that a job has."""

    values: dict[str, Any]
    """Our fields, with dots, and the values to write; from `spec` on, or from `metadata`."""
    note: str = ""
    """Computation of the value, or its difference from the peer's."""


@dataclass(frozen=True)
class Unneeded:
    """A peer's field that makes no difference to a job."""

    reason: str


@dataclass(frozen=True)
class Left:
    """A peer's field that was not converted and needs the user's attention."""

    reason: str
    values: dict[str, Any] = field(default_factory=dict)
    """Values to write instead, which make the job valid."""


Outcome = Written | Unneeded | Left | None
"""The result for a field; None if its value has no effect."""


@dataclass(frozen=True)
class Unknown:
    """A value that is known only when a script runs."""

    text: str
    """The value as far as it is known, for people."""
    reason: str

    def __str__(self) -> str:
        return self.text


class Theirs:
    """A peer's configuration, with the peer's defaults for omitted fields, and for values that are unknown.

    Args:
        given: fields of the configuration, by name.
        defaults: defaults, by name.
        processes: number of processes that it runs with; None if nobody has said.
        name: name of its file, without the ending.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], processes: int | None, name: str) -> None:
        self.given = given
        self.processes = processes or 1
        self.processes_known = processes is not None
        self.name = name
        self.met: dict[str, Unknown] = {}
        """Unknown values that were asked for since the last `forget`."""
        self._defaults = defaults

    def __getitem__(self, name: str) -> Any:
        value = self.given[name] if name in self.given else self._defaults[name]
        if isinstance(value, Unknown):
            self.met[name] = value
            return self._defaults.get(name)
        return value

    def forget(self) -> None:
        """Forget which unknown values were asked for."""
        self.met = {}

    def number(self, name: str) -> float:
        """Return a field as a number. YAML files of other tools may hold `1e-6`, which PyYAML reads as text.

        Raises:
            ValueError: it is not a number.
        """
        value = self[name]
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{name} is {value!r}, which is not a number") from None

    def whole(self, name: str) -> int:
        """Return a field as a whole number.

        Raises:
            ValueError: it is not a whole number.
        """
        number = self.number(name)
        if not math.isfinite(number) or number != int(number):
            raise ValueError(f"{name} is {self[name]!r}, which is not a whole number")
        return int(number)


@dataclass(frozen=True)
class Row:
    """One field of a peer, with its conversion."""

    default: Any
    """Its default value."""
    convert: Callable[[Any, Theirs], Outcome]
    """Converts a value."""
    also: tuple[str, ...] = ()
    """Other fields that the conversion uses, which have rows of their own."""


@dataclass(frozen=True)
class Line:
    """The result for one field: a line of the report."""

    theirs: str
    value: Any
    outcome: Written | Unneeded | Left
    given: bool
    """Whether the configuration has the field; otherwise the peer's default was converted."""


@dataclass(frozen=True)
class Conversion:
    """A job from a peer's configuration."""

    peer: str
    """Name of the peer, with the release of the defaults."""
    source: str
    """Name of the file."""
    document: dict[str, Any]
    origins: dict[str, str]
    """The peer's field for each of our fields."""
    lines: list[Line]
    lost: dict[str, str] = field(default_factory=dict)
    """Parts of the file that are no fields, and why they were not converted."""

    @property
    def left(self) -> list[Line]:
        """The fields that need the user's attention."""
        return [line for line in self.lines if isinstance(line.outcome, Left)]


def convert_rows(
    peer: str,
    source: str,
    rows: Mapping[str, Row],
    given: Mapping[str, Any],
    processes: int | None = 1,
    lost: Mapping[str, str] | None = None,
) -> Conversion:
    """Convert a configuration by its peer's table.

    Args:
        peer: name of the peer.
        source: name of its file.
        rows: the table.
        given: fields of the configuration; names that the table lacks are left to the user.
        processes: number of processes that it is launched with, if its numbers are per process; None if nobody said.
        lost: parts of the file that are no fields, and why they were not converted.
    """
    theirs = Theirs(given, {name: row.default for name, row in rows.items()}, processes, PurePosixPath(source).stem)
    lines = [line for name, row in rows.items() if (line := _line(name, row, theirs)) is not None]
    unknown = Left(f"{peer} has no such field, or rlhfless does not know it")
    lines += [Line(name, value, unknown, True) for name, value in given.items() if name not in rows]
    # A field that replaces another one's row is not reported as a part of it.
    shown = {line.theirs for line in lines if not isinstance(line.outcome, Unneeded)}
    lines = [line for line in lines if not (isinstance(line.outcome, Unneeded) and line.theirs in shown)]
    return _settled(Conversion(peer, source, {}, {}, lines, dict(lost or {})))


def _line(name: str, row: Row, theirs: Theirs) -> Line | None:
    named = [one for one in (name, *row.also) if one in theirs.given]
    theirs.forget()
    try:
        outcome = row.convert(theirs[name], theirs)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        outcome = Left(_problem(name, error))
    if theirs.met and not isinstance(row.convert, Reason):
        reasons = "; ".join(dict.fromkeys(unknown.reason for unknown in theirs.met.values()))
        instead = {} if outcome is None or isinstance(outcome, Unneeded) else outcome.values
        others = [each for each in theirs.met if each not in named]
        about = f" ({', '.join(others)})" if others else ""
        outcome = Left(f"{reasons}{about}{'; the value here stands in for it' if instead else ''}", instead)
    if outcome is None and name in theirs.given:
        outcome = Unneeded("its value has no effect on a job")
    if outcome is None or (isinstance(outcome, Unneeded) and name not in theirs.given):
        return None
    shown = named[0] if named else name
    value = theirs.given[shown] if shown in theirs.given else theirs[shown]
    return Line(shown, value, outcome, bool(named))


def _problem(name: str, error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) and str(error) else f"{name} has a value of another kind"


# --- the document, which is valid in any case ---


_SMALLEST = {
    "metadata.name": "job",
    "spec.model.source": "model",
    "spec.data.source": "train.jsonl",
    "spec.rewards": [{"name": "reward", "python": {"file": "reward.py", "function": "reward"}}],
    "spec.steps": 1,
}
"""Values without which no job is valid."""

_INSTEAD = {"spec.steps": "spec.epochs", "spec.data.source": "spec.data.sources"}
"""Fields that take the place of one of these."""


def _settled(conversion: Conversion) -> Conversion:
    """Return a conversion with a valid document: values that a job can't have are left to the user."""
    for _ in range(len(conversion.lines) + 1):
        conversion = _with_document(conversion)
        try:
            parse_content(copy.deepcopy(conversion.document), conversion.source)
        except InvalidJobError as error:
            lines = [_left_if_faulty(line, error.faults) for line in conversion.lines]
            if lines == conversion.lines:
                raise
            conversion = dataclasses.replace(conversion, lines=lines)
        else:
            return conversion
    raise AssertionError("each round leaves a value out")


def _left_if_faulty(line: Line, faults: list[Fault]) -> Line:
    if isinstance(line.outcome, Unneeded):
        return line
    values = dict(line.outcome.values)
    reasons = [line.outcome.reason] if isinstance(line.outcome, Left) else []
    for fault in faults:
        path = re.sub(r"\[.*", "", fault.path)
        for name in [name for name in values if f"{path}.".startswith(f"{name}.") or name.startswith(f"{path}.")]:
            if len(faults) > 1 and fault.message.startswith("is missing"):
                continue
            del values[name]
            reasons.append(f"{fault.path}: {fault.message}; {fault.remedy}")
    if values == line.outcome.values:
        return line
    return dataclasses.replace(line, outcome=Left("; ".join(reasons), values))


def _with_document(conversion: Conversion) -> Conversion:
    document: dict[str, Any] = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {}, "spec": {}}
    origins: dict[str, str] = {}
    for line in conversion.lines:
        for path, value in ({} if isinstance(line.outcome, Unneeded) else line.outcome.values).items():
            _put(document, path, value)
            origins[path] = line.theirs if line.given else f"{conversion.peer.split()[0]}'s default"
    for path, value in _SMALLEST.items():
        if path not in origins and _INSTEAD.get(path) not in origins:
            _put(document, path, value)
            origins[path] = "to be written by you"
    document["spec"] = {name: document["spec"][name] for name in sorted(document["spec"], key=_place)}
    return dataclasses.replace(conversion, document=document, origins=origins)


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


_KINDS = {".".join(path): field.kind for path, field in walk(RLHFJob)}


def to(ours: str) -> Callable[[Any, Theirs], Outcome]:
    """Write the same value under our name; nothing if it is null. A number may be a text, such as PyYAML's `1e-6`."""
    kind = _KINDS[f"spec.{ours}"]

    def convert(value: Any, theirs: Theirs) -> Outcome:
        if value is None:
            return None
        return Written({f"spec.{ours}": float(value) if kind is float else value})

    return convert


def renamed(defaults: Mapping[str, Any]) -> dict[str, Row]:
    """Make the rows of fields that keep their value under our name, which `familiar_names` has.

    Args:
        defaults: the peer's default of each field, by its name.
    """
    return {name: Row(default, to((our_field(name) or "").removeprefix("spec."))) for name, default in defaults.items()}


def one_of(
    ours: str, meanings: Mapping[Any, Any], otherwise: str, instead: Any = None
) -> Callable[[Any, Theirs], Outcome]:
    """Convert a choice by its name in the peer.

    Args:
        ours: our field.
        meanings: our value for each of theirs.
        otherwise: why other values have no counterpart.
        instead: the value to write in their place.
    """

    def convert(value: Any, theirs: Theirs) -> Outcome:
        if value in meanings:
            return Written({f"spec.{ours}": meanings[value]})
        return Left(f"{value}: {otherwise}", {} if instead is None else {f"spec.{ours}": instead})

    return convert


@dataclass(frozen=True)
class Reason:
    """The conversion of a field that is never written by its own row."""

    reason: str
    part: bool
    """Whether another row reads it; otherwise it has no effect on a job, at any value."""

    def __call__(self, value: Any, theirs: Theirs) -> Outcome:
        return Unneeded(f"part of {self.reason}" if self.part else self.reason)


def unneeded(reason: str) -> Reason:
    """Report a field as one without effect on a job, at any value."""
    return Reason(reason, part=False)


def without(reason: str, *harmless: Any) -> Callable[[Any, Theirs], Outcome]:
    """Leave a field without a counterpart to the user, unless its value is null or in `harmless`."""
    return lambda value, theirs: None if value is None or value in harmless else Left(reason)


def part_of(ours: str) -> Reason:
    """Report a field as a part of another row, which reads it."""
    return Reason(ours, part=True)


def job_name(text: str) -> str:
    """Turn a text into a name that a job may have."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:53].strip("-") or "job"


def share(whole: int, part: int, what: str) -> int:
    """Divide `whole` by `part`.

    Raises:
        ValueError: the division has a remainder.
    """
    if part < 1 or whole % part:
        raise ValueError(f"{what}: {whole} is not a multiple of {part}")
    return whole // part


def trackers(value: Any, project: str, *silent: str) -> Outcome:
    """Write the trackers that a peer's list names.

    Args:
        project: project of Weights & Biases.
        silent: names in the list that need nothing.
    """
    names = [value] if isinstance(value, str) else list(value or [])
    values: dict[str, Any] = {"spec.tracking.tensorboard": True} if "tensorboard" in names else {}
    if "wandb" in names:
        values["spec.tracking.wandb"] = {"project": project}
    others = [str(name) for name in names if name not in ("tensorboard", "wandb", *silent)]
    if others:
        return Left(f"{', '.join(others)}: see spec.tracking for what there is (mlflow needs an address)", values)
    return Written(values) if values else None
