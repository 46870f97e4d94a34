"""Rows of a slot cache that outlive the run that filled them. Their responses continue without computing anything anew.

After a swap of the weights, a row's keys and values are those of older weights, as in AReaL and PipelineRL. A row is
kept only for the response that filled it. Everything else is computed with the weights that are loaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rlhfless_functions.generation.engines.base import SequenceKey, SequenceTask
from rlhfless_functions.generation.engines.kv_cache import SlotCache, padded


@dataclass(frozen=True)
class HeldRow:
    """A row that a run has left: keys and values of the prompt and the response, except for the last token."""

    slot: int
    task: SequenceTask
    """The task of that run."""
    response_tokens: Sequence[int]
    """The whole response as it is now."""

    def holds(self, task: SequenceTask) -> bool:
        """Return whether a task continues this response, from its last token or an earlier one."""
        known = len(task.response_tokens)
        return (
            known > 0
            # The seed is the sample's own. A later step may sample the same prompt again.
            and task.seed == self.task.seed
            and list(task.prompt_tokens) == list(self.task.prompt_tokens)
            and list(task.response_tokens) == list(self.response_tokens[:known])
        )

    def is_continued_by(self, task: SequenceTask) -> bool:
        """Return whether a task continues this response behind its last token."""
        known = len(self.response_tokens)
        return (
            task.seed == self.task.seed
            and list(task.prompt_tokens) == list(self.task.prompt_tokens)
            and list(task.response_tokens[:known]) == list(self.response_tokens)
        )


@dataclass(frozen=True)
class KeptRows:
    """The rows that a new run takes over."""

    tasks: Mapping[int, SequenceTask] = field(default_factory=dict)
    """Tasks by the row's slot in the new run."""
    moves: Mapping[int, int] = field(default_factory=dict)
    """New slots of the rows that move, by their old slot. No new slot is the present slot of a kept row."""

    @cached_property
    def _keys(self) -> frozenset[SequenceKey]:
        return frozenset(task.key for task in self.tasks.values())

    def __contains__(self, task: SequenceTask) -> bool:
        return task.key in self._keys

    @cached_property
    def tokens(self) -> int:
        """Number of tokens that need not be computed again. A prompt of several responses counts once."""
        prompts = {task.prompt: len(task.prompt_tokens) for task in self.tasks.values()}
        return sum(prompts.values()) + sum(len(task.response_tokens) - 1 for task in self.tasks.values())

    @torch.inference_mode()
    def move(self, cache: SlotCache, device: torch.device) -> None:
        """Copy the rows that change their slots."""
        if self.moves:
            longest = max(_length(self.tasks[slot]) for slot in self.moves.values())
            sources, slots = (torch.tensor(list(each), device=device) for each in (self.moves, self.moves.values()))
            cache.copy(sources, slots, padded(longest))


def keep_rows(held: Iterable[HeldRow], tasks: Sequence[SequenceTask], slots: int) -> KeptRows:
    """Find the rows that tasks of a new run continue.

    Args:
        held: rows that the run before has left.
        tasks: tasks of the new run, in the order of admission.
        slots: number of slots of the new run. Rows beyond them move.
    """
    by_seed = {row.task.seed: row for row in held}
    known = [(by_seed[task.seed], task) for task in tasks if task.seed in by_seed]
    found = [(row.slot, task) for row, task in known if row.holds(task)][:slots]
    taken = {slot for slot, _ in found}
    free = (slot for slot in range(slots) if slot not in taken)
    moves = {slot: next(free) for slot, _ in found if slot >= slots}
    return KeptRows({moves.get(slot, slot): task for slot, task in found}, moves)


def _length(task: SequenceTask) -> int:
    """Return the number of tokens whose keys and values the row of a continued response needs."""
    return len(task.prompt_tokens) + len(task.response_tokens) - 1
