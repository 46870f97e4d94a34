"""Few jobs that cover much: every value of every option, or every pair of values of any two options.

Which combinations are jobs at all is the document's own affair. A maintained library (allpairspy) was no match: it asks
of a combination's beginning whether it may stay, and here options that come late make earlier ones possible.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

Choice = tuple[str, int]
"""An axis and the number of one of its values."""
Combination = dict[str, int]
"""The number of a value for every axis."""


class Covering:
    """Combinations of the values of axes.

    Args:
        axes: the values of each; the first is taken where nothing else is asked.
        valid: whether a combination can be.
        rare: values that need not be paired with others.
        free: axes that no combination becomes impossible by.
        mending: axes that make others possible; two of them at once are tried for that.
    """

    def __init__(
        self,
        axes: Mapping[str, tuple[Any, ...]],
        valid: Callable[[Combination], bool],
        rare: Iterable[Choice] = (),
        free: Iterable[str] = (),
        mending: Iterable[str] = (),
    ) -> None:
        self._sizes = {name: len(values) for name, values in axes.items()}
        self._valid = valid
        self._rare = set(rare)
        self._free = set(free)
        self._mending = set(mending)
        self._bound = [name for name in self._sizes if name not in self._free]
        self._known: dict[tuple[int, ...], bool] = {}
        self.impossible: list[tuple[Choice, ...]] = []
        """What is in no valid combination, as far as was looked for one."""

    def each(self) -> list[Combination]:
        """Few combinations with every value in one of them at least."""
        return self._cover({(choice,) for choice in self._choices()})

    def pairs(self) -> list[Combination]:
        """Few combinations with every pair of values in one of them at least; rare values are in one."""
        common = [choice for choice in self._choices() if choice not in self._rare]
        wanted = {_goal(*pair) for pair in combinations(common, 2) if pair[0][0] != pair[1][0]}
        singles: set[tuple[Choice, ...]] = {(choice,) for choice in self._rare}
        return self._cover(singles.union(wanted))

    def _choices(self) -> list[Choice]:
        return [(name, number) for name, size in self._sizes.items() for number in range(size)]

    def _cover(self, wanted: set[tuple[Choice, ...]]) -> list[Combination]:
        self.impossible = []
        chance = random.Random(0)
        left = dict.fromkeys(sorted(wanted))
        found: list[Combination] = []
        while left:
            first = next(iter(left))
            begun = self._with(first)
            if begun is None:
                self.impossible.append(first)
                del left[first]
                continue
            found.append(self._filled(begun, left, chance))
            left = {goal: None for goal in left if not _is_in(goal, found[-1])}
        return found

    def _with(self, goal: tuple[Choice, ...]) -> Combination | None:
        """A valid combination that has the goal, with as few other changes as may be."""
        fixed = dict(goal)
        base = {name: fixed.get(name, 0) for name in self._sizes}
        others = [choice for choice in self._choices() if choice[1] and choice[0] not in fixed]
        tries: list[tuple[Choice, ...]] = [(), *((choice,) for choice in others if choice[0] in self._bound)]
        tries += combinations([choice for choice in others if choice[0] in self._mending], 2)
        for changes in tries:
            if len(dict(changes)) == len(changes) and self._is_valid(tried := base | dict(changes)):
                return tried
        return None

    def _filled(
        self, begun: Combination, left: Mapping[tuple[Choice, ...], None], chance: random.Random
    ) -> Combination:
        """Change one axis after another to what covers most, where that can be."""
        goal = next(iter(left))
        fixed = {name for name, _ in goal}
        names = [name for name in self._sizes if name not in fixed]
        chance.shuffle(names)
        taken: set[Choice] = set(goal)
        for name in names:
            gains = {number: 0 for number in range(self._sizes[name]) if (name, number) not in self._rare}
            for number in gains:
                gains[number] = sum(_goal((name, number), other) in left for other in taken)
                gains[number] += ((name, number),) in left
            order = sorted(gains, key=lambda number: (-gains[number], chance.random()))
            for number in order:
                if name in self._free or self._is_valid(begun | {name: number}):
                    begun[name] = number
                    break
            taken.add((name, begun[name]))
        return begun

    def _is_valid(self, combination: Combination) -> bool:
        key = tuple(combination[name] for name in self._bound)
        if key not in self._known:
            self._known[key] = self._valid(combination)
        return self._known[key]


def _goal(first: Choice, second: Choice) -> tuple[Choice, Choice]:
    return (first, second) if first < second else (second, first)


def _is_in(goal: tuple[Choice, ...], combination: Combination) -> bool:
    return all(combination[name] == number for name, number in goal)
