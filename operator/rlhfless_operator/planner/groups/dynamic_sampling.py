"""Dynamic sampling (DAPO, arXiv 2503.14476): fresh prompts take the places of groups that teach nothing.

A round's groups are drawn in the places of those of the round before. A group that is known to teach nothing is
replaced at once, while others of its round are still under way. As more groups are known, the end of each round only
moves on. So the prompts that a step learns from depend on the order of their draw and on the rewards of their groups,
and on nothing that happens on the way. A driver that takes a step again comes to the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class SamplingRounds:
    """The prompts of one step. Draw `count` of them and `settle` groups as they are known, until it `is_over`."""

    groups: int
    """Number of groups that the step learns from."""
    replacements: int
    """Most rounds after the first. With 0 every group is kept."""
    available: int
    """Number of prompts in the dataset; a step takes none of them twice."""
    left: int | None = None
    """Number of prompts that the job's epochs have left before the step; None if they are not counted. The first round
    is whole all the same."""
    drawn: list[int] = field(default_factory=list)
    """Every prompt that was drawn, in order."""
    _teaches: dict[int, bool] = field(default_factory=dict)
    """Whether the group of each prompt teaches something, as far as it is known."""

    @property
    def count(self) -> int:
        """Number of prompts to draw now, by the groups that are known. If too few are left, all of them."""
        return self._ends()[-1] - len(self.drawn)

    @property
    def is_over(self) -> bool:
        """Whether every group is known, and no prompt is to be drawn."""
        return len(self._teaches) == len(self.drawn) and not self.count

    @property
    def done(self) -> int:
        """Number of rounds."""
        return len(self._ends())

    def draw(self, prompts: Sequence[int]) -> None:
        """Record the prompts that were drawn."""
        self.drawn += prompts

    def settle(self, prompt: int, *, teaches: bool) -> None:
        """Record whether the group of a prompt teaches something."""
        self._teaches[prompt] = teaches or self.replacements == 0

    @property
    def chosen(self) -> list[int]:
        """Prompts that the step learns from. If the rounds are used up, groups that teach nothing fill the batch."""
        kept = [prompt for prompt in self.drawn if self._teaches.get(prompt, True)]
        return [*kept, *self._flat(len(self.drawn))][: self.groups]

    @property
    def replaced(self) -> int:
        """Number of groups that taught nothing and are not in the batch."""
        return len(self.drawn) - len(self.chosen)

    def note(self, step: int) -> str | None:
        """Return a sentence for the user once it is over; None if there is nothing to say."""
        flat = self._flat(len(self.drawn))
        if not flat:
            return None
        rounds = "1 round" if self.done == 1 else f"{self.done} rounds"
        begins = f"step {step}: {len(flat)} of {len(self.drawn)} groups in {rounds} had equal rewards"
        if missing := self.groups - (len(self.drawn) - len(flat)):
            why = "no round" if self.done > self.replacements else "no prompt"
            return f"{begins}; {why} is left, and {missing} of them fill the batch"
        return f"{begins}; fresh prompts took the places of groups that teach nothing"

    def _flat(self, count: int) -> list[int]:
        """Return which of so many prompts that were drawn first are known to teach nothing."""
        return [prompt for prompt in self.drawn[:count] if not self._teaches.get(prompt, True)]

    def _ends(self) -> list[int]:
        """Return the number of prompts up to the end of each round, by the groups that are known."""
        ends = [min(self.groups, self.available)]
        most = self.available if self.left is None else max(ends[0], min(self.available, self.left))
        for _ in range(self.replacements):
            end = min(self.groups + len(self._flat(ends[-1])), most)
            if end == ends[-1]:
                break
            ends.append(end)
        return ends
