"""Which steps' responses are kept to draft later ones from. Tokens never come here: only who was visited when."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_TOKENS = 2**28
"""Most response tokens that are kept: about half a gigabyte on disk."""


@dataclass
class _Visited:
    prompts: set[int]
    """Those whose newest visit the step is."""
    tokens: int
    """Response tokens of the whole step."""


class DraftHistory:
    """The steps of prompts' newest visits. Part of the checkpoint; where it is lost, drafts are fewer."""

    def __init__(self) -> None:
        self._steps: dict[int, _Visited] = {}

    @property
    def kept(self) -> list[int]:
        """Steps whose responses are kept, in order."""
        return sorted(self._steps)

    def generated(self, step: int, lengths: Mapping[int, Sequence[int]]) -> None:
        """A step's responses are there, of these lengths by prompt. The newest step's are kept anyway."""
        for visited in self._steps.values():
            visited.prompts -= lengths.keys()
        newest = max([step, *self._steps])
        self._steps[step] = _Visited(set(lengths), sum(map(sum, lengths.values())))
        self._steps = {number: self._steps[number] for number in self.kept if self._steps[number].prompts}
        while len(self._steps) > 1 and sum(visited.tokens for visited in self._steps.values()) > KEPT_TOKENS:
            del self._steps[next(number for number in self.kept if number != newest)]

    def steps_for(self, prompts: Collection[int]) -> list[int]:
        """Steps with the newest visits of any of these prompts, and the newest of all, in order."""
        wanted = set(prompts)
        newest = self.kept[-1:]
        return [number for number in self.kept if number in newest or self._steps[number].prompts & wanted]

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, as JSON values."""
        return {str(number): [sorted(each.prompts), each.tokens] for number, each in self._steps.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._steps = {int(number): _Visited(set(prompts), tokens) for number, (prompts, tokens) in state.items()}
