"""The variables of a script on its way, and arithmetic that changes them."""

import re

from rlhfless_operator.convert.shell.values import State, Unknowns, UnknownValueError, Value
from rlhfless_operator.convert.shell.words import Words


class Variables:
    """Variables and arguments, as far as they are known.

    Args:
        state: their values at the beginning.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.unknowns = Unknowns()
        self.words = Words(lambda: self.state, self.unknowns)
        self.locals: list[dict[str, Value | None]] = []
        """The earlier values of the local variables of each function that is being called."""
        self.numbers: set[str] = set()
        """Variables that are numbers (`declare -i`)."""
        self.sourced: list[str] = []
        """Commands that read another script."""

    def calculated(self, text: str) -> bool | None:
        """Follow arithmetic, and return whether it is not 0."""
        try:
            return self.words.number(text) != 0
        except UnknownValueError as error:
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", text, re.ASCII):
                self.state.values[name] = self.unknowns.add(str(error))
            return None
