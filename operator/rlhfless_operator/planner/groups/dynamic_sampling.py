"""Dynamic sampling (DAPO, arXiv 2503.14476), in rounds: fresh prompts take the places of groups that teach nothing.

Which prompts a step learns from depends on the order in which they were drawn, and on what their groups came to, and on
nothing that happens on the way: a driver that takes a step again comes to the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class SamplingRounds:
    """The prompts of one step, round by round: draw `count` of them, generate, `settle`, until none are wanted."""

    groups: int
    """Groups that the step learns from."""
    replacements: int
    """Most rounds after the first; at 0 every group is kept."""
    available: int
    """Prompts of the dataset; a step takes none of them twice."""
    kept: list[int] = field(default_factory=list)
    """Prompts whose groups teach something, in the order of their draw."""
    flat: list[int] = field(default_factory=list)
    """Prompts whose groups don't, in the order of their draw."""
    done: int = 0
    """Rounds that are settled."""

    @property
    def taken(self) -> list[int]:
        """Every prompt that was drawn."""
        return [*self.kept, *self.flat]

    @property
    def count(self) -> int:
        """How many prompts the next round draws; 0 after the last. Where the data has too few, all that it has left."""
        if self.done > self.replacements:
            return 0
        return min(self.groups - len(self.kept), self.available - len(self.taken))

    def settle(self, prompts: Sequence[int], teaches: Callable[[int], bool]) -> None:
        """Take note of what a round's groups came to."""
        for prompt in prompts:
            (self.kept if self.replacements == 0 or teaches(prompt) else self.flat).append(prompt)
        self.done += 1

    @property
    def chosen(self) -> list[int]:
        """What is learnt: where the rounds are used up, groups that teach nothing fill the batch."""
        return [*self.kept, *self.flat][: self.groups]

    @property
    def replaced(self) -> int:
        """Groups that taught nothing and are not in the batch."""
        return len(self.taken) - len(self.chosen)

    def note(self, step: int) -> str | None:
        """What a person should know after a round; None if there is nothing to say."""
        if self.replacements == 0 or not self.flat:
            return None
        begins = f"step {step}, round {self.done}: {len(self.flat)} of {len(self.taken)} groups had equal rewards"
        if self.count:
            return f"{begins}; {self.count} fresh prompts take the places of groups that teach nothing"
        if missing := self.groups - len(self.kept):
            why = "no round" if self.done > self.replacements else "no prompt"
            return f"{begins}; {why} is left, and {missing} of them fill the batch"
        return None
