"""A rule over the fields of a job, and its violation."""

from collections.abc import Callable
from dataclasses import dataclass

from rlhfless_operator.job.sections import JobFields


@dataclass(frozen=True)
class Violation:
    """A rule that a job breaks. Paths are in camelCase and start below `spec`."""

    field: str
    """Field that the report names."""
    reads: tuple[str, ...]
    """Fields that the rule read."""
    message: str


@dataclass(frozen=True)
class CelRule:
    """A rule for the API server."""

    expression: str | None
    """CEL over `self`, the rule's section with defaults filled in; `oldSelf` is the section before a change. None if
    the API server can't check the rule: then only `rlhfless validate` and the operator do."""
    message: str
    """The rule itself, in one sentence."""


@dataclass(frozen=True)
class Rule:
    """One rule over the fields of a job's spec."""

    field: str
    """Path of the field that a violation is reported at, in camelCase below `spec`."""
    reads: tuple[str, ...]
    """Paths of all fields that it reads."""
    check: Callable[[JobFields], str | None]
    """`what is wrong; the remedy`, or None if the rule holds."""
    cel: CelRule
    """The same for the API server."""
