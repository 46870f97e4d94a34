"""The commands of a shell script, as a tree. Words stay as they are written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Simple:
    """A command with its words, or assignments alone."""

    words: tuple[str, ...]
    line: int
    documents: list[str]
    """Texts of its here-documents, which are read with the end of its line."""


@dataclass(frozen=True)
class Arithmetic:
    """`(( text ))`."""

    text: str
    line: int


@dataclass(frozen=True)
class Condition:
    """`[[ words ]]`."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`."""

    commands: tuple["Node", ...]
    negated: bool


@dataclass(frozen=True)
class Chain:
    """Commands joined by `&&` and `||`."""

    first: "Node"
    rest: tuple[tuple[str, "Node"], ...]


@dataclass(frozen=True)
class Group:
    """`{ body; }`, or `( body )` in a shell of its own."""

    body: tuple["Node", ...]
    own_shell: bool


@dataclass(frozen=True)
class If:
    """Conditions with their bodies, and the body of `else`."""

    branches: tuple[tuple[tuple["Node", ...], tuple["Node", ...]], ...]
    otherwise: tuple["Node", ...]
    line: int


@dataclass(frozen=True)
class While:
    """A loop while its condition is true; with `negated`, until it is."""

    condition: tuple["Node", ...]
    body: tuple["Node", ...]
    negated: bool
    line: int


@dataclass(frozen=True)
class For:
    """A loop over words; None for the script's arguments."""

    name: str
    words: tuple[str, ...] | None
    body: tuple["Node", ...]
    line: int


@dataclass(frozen=True)
class Counting:
    """`for ((begin; condition; step))`."""

    parts: tuple[str, str, str]
    body: tuple["Node", ...]
    line: int


@dataclass(frozen=True)
class Case:
    """A word, and patterns with their bodies."""

    word: str
    items: tuple[tuple[tuple[str, ...], tuple["Node", ...]], ...]
    line: int


@dataclass(frozen=True)
class Function:
    """The definition of a function."""

    name: str
    body: "Node"


Node = Simple | Arithmetic | Condition | Pipeline | Chain | Group | If | While | For | Counting | Case | Function
