"""The tests of one row, as the judge runs them."""

from dataclasses import dataclass, field
from typing import Any

Unit = dict[str, Any]
"""One test in a form that JSON holds, for the judge. Its `kind` says how it runs, with further keys:

- `script`: `text` runs; with `main`, as the main program.
- `function`: `text` runs, then its function `name`, once for each of pytest's parameter sets.
- `method`: `text` runs, then the method `name` of its class `owner`, as unittest or pytest would.
- `check`: `text` runs, then HumanEval's `check` with the value of the expression `entry`.
- `call`: the code's function `name` with `arguments` returns `expected`. With `either`, `expected` is a list with one
  item, which counts too.
"""


class TestsError(LookupError):
    """A row's tests can't be run, or can't fail. The message says why, and what to do."""

    __test__ = False


@dataclass(frozen=True)
class CodeTests:
    """The tests of one row: either units or programs."""

    __test__ = False
    units: list[Unit] = field(default_factory=list)
    """Tests of the code's functions."""
    programs: list[tuple[str, str]] = field(default_factory=list)
    """Standard input of the code as a program, and the output that it should print."""
    entry: str | None = None
    """Name of the function under test, if the row names one. Then the code runs after the imports that such data takes
    for granted, and after the prompt, if that is Python."""

    def __len__(self) -> int:
        return len(self.units) + len(self.programs)
