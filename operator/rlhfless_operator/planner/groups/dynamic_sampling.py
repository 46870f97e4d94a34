"""Dynamic sampling (DAPO, arXiv 2503.14476), in rounds: fresh prompts take the places of groups that teach nothing.

The prompts that a step learns from depend on the order of their draw and on the rewards of their groups, and on nothing
that happens on the way. So a driver that takes a step again comes to the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class SamplingRounds:
    """The prompts of one step, round by round: draw `count` of them, generate, `settle`, until none are wanted."""

    groups: int
    """Number of groups that the step learns from."""
    replacements: int
    """Most rounds after the first. With 0 every group is kept."""
    available: int
    """Number of prompts in the dataset; a step takes none of them twice."""
    left: int | None = None
    """Number of prompts that the job's epochs have left before the step; None if they are not counted. The first round
    is whole all the same."""
    kept: list[int] = field(default_factory=list)
    """Prompts whose groups teach something, in the order of their draw."""
    flat: list[int] = field(default_factory=list)
    """Prompts whose groups teach nothing, in the order of their draw."""
    done: int = 0
    """Number of rounds that are settled."""

    @property
    def taken(self) -> list[int]:
        """Every prompt that was drawn."""
        return [*self.kept, *self.flat]

    @property
    def count(self) -> int:
        """Number of prompts that the next round draws; 0 after the last. If too few are left, all of them."""
        if self.done > self.replacements:
            return 0
        most = self.available if self.left is None or self.done == 0 else min(self.available, self.left)
        return max(0, min(self.groups - len(self.kept), most - len(self.taken)))

    def settle(self, prompts: Sequence[int], teaches: Callable[[int], bool]) -> None:
        """Record which of a round's groups teach something."""
        for prompt in prompts:
            (self.kept if self.replacements == 0 or teaches(prompt) else self.flat).append(prompt)
        self.done += 1

    @property
    def chosen(self) -> list[int]:
        """Prompts that the step learns from. If the rounds are used up, groups that teach nothing fill the batch."""
        return [*self.kept, *self.flat][: self.groups]

    @property
    def replaced(self) -> int:
        """Number of groups that taught nothing and are not in the batch."""
        return len(self.taken) - len(self.chosen)

    def note(self, step: int) -> str | None:
        """Return a sentence for the user after a round; None if there is nothing to say."""
        if self.replacements == 0 or not self.flat:
            return None
        begins = f"step {step}, round {self.done}: {len(self.flat)} of {len(self.taken)} groups had equal rewards"
        if self.count:
            return f"{begins}; {self.count} fresh prompts take the places of groups that teach nothing"
        if missing := self.groups - len(self.kept):
            why = "no round" if self.done > self.replacements else "no prompt"
            return f"{begins}; {why} is left, and {missing} of them fill the batch"
        return None
