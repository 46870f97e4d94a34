"""The forms of a mathematical answer."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Words:
    """A text without mathematics: a choice (`B`), a name, `no solution`, a time of day."""

    text: str
    """In lower case, with single spaces and without punctuation."""
    labelled: "Reading | None" = None
    """The answer after a choice's letter: 42 of `(B) 42`."""


@dataclass(frozen=True)
class Expression:
    """A number, an expression, an equation or an inequality."""

    value: Any
    """SymPy's object, not evaluated."""
    latex: str
    unit: str | None = None
    """See `units.Measured`."""
    percent: bool = False
    base: str = ""
    """Base in which a number is written, if it says so: `8` of `2516_8`."""
    glued: "Expression | None" = None
    """The number alone, if the letter after it may be a unit: 5 metres of `5m`."""


@dataclass(frozen=True)
class Items:
    """Several answers."""

    brackets: str
    """The brackets around: `(]` and the like for intervals, pairs and tuples; `{}` for sets; `:` for ratios; `∪` for
    unions; an empty text for a bare list."""
    items: tuple["Reading", ...]
    latex: str
    """The whole as LaTeX, for the comparison with other forms of the same set."""


Reading = Words | Expression | Items
"""A text as mathematics."""
