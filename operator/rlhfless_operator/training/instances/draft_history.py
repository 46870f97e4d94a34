"""The steps whose responses are kept to draft later ones from. It holds lengths and visits, never tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEPT_TOKENS = 2**28
"""Most response tokens that are kept: about half a gigabyte on disk."""


@dataclass
class _Visited:
    prompts: set[int]
    """Prompts whose newest visit is this step."""
    tokens: int
    """Response tokens of the whole step."""


class DraftHistory:
    """The steps of prompts' newest visits. Part of the checkpoint. If it is lost, there are fewer drafts."""

    def __init__(self) -> None:
        self._steps: dict[int, _Visited] = {}

    @property
    def kept(self) -> list[int]:
        """Steps whose responses are kept, in order."""
        return sorted(self._steps)

    def generated(self, step: int, lengths: Mapping[int, Sequence[int]]) -> None:
        """Note the lengths of a step's responses, by prompt. The newest step's responses are always kept."""
        for visited in self._steps.values():
            visited.prompts -= lengths.keys()
        newest = max([step, *self._steps])
        self._steps[step] = _Visited(set(lengths), sum(map(sum, lengths.values())))
        self._steps = {number: self._steps[number] for number in self.kept if self._steps[number].prompts}
        while len(self._steps) > 1 and sum(visited.tokens for visited in self._steps.values()) > KEPT_TOKENS:
            del self._steps[next(number for number in self.kept if number != newest)]

    def steps_for(self, prompts: Collection[int]) -> list[int]:
        """Return the steps with the newest visits of any of these prompts, and the newest step of all, in order."""
        wanted = set(prompts)
        newest = self.kept[-1:]
        return [number for number in self.kept if number in newest or self._steps[number].prompts & wanted]

    def state(self) -> dict[str, Any]:
        """Return all JSON values that `restore` needs."""
        return {str(number): [sorted(each.prompts), each.tokens] for number, each in self._steps.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._steps = {int(number): _Visited(set(prompts), tokens) for number, (prompts, tokens) in state.items()}
