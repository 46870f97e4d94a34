"""The position in the training data. It is part of the checkpoint: no prompt is skipped or repeated."""

import math
from collections.abc import Collection, Sequence
from typing import Any, Self

import numpy as np


class DataCursor:
    """Draws prompts epoch by epoch, each exactly once an epoch, and never the same one twice in a step.

    Args:
        prompts: number of prompts in the dataset.
        seed: the job's seed; with the epoch it makes the order.
        shuffle: draw in a new order in each epoch, or in the dataset's.
        mix: number of prompts of each source, one after the other, and its weight: how often each comes in an epoch.
    """

    def __init__(
        self, prompts: int, seed: int, *, shuffle: bool, mix: Sequence[tuple[int, float]] | None = None
    ) -> None:
        self._mix = None if mix is None or all(weight == 1 for _, weight in mix) else tuple(mix)
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._deferred: list[int] = []
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._epoch

    @property
    def drawn(self) -> int:
        """Number of prompts that were drawn since the first epoch's beginning."""
        return self.prompts_in(self._epoch) + self._position - len(self._deferred)

    def draw(self, count: int, taken: Collection[int] = ()) -> list[int]:
        """Draw the next prompts.

        A prompt that the step has already (`taken`, or drawn at an epoch's end and again at the next one's start) is
        deferred to the next draw, not skipped.

        Raises:
            ValueError: the dataset has too few prompts for a step without repetition.
        """
        if count + len(taken) > self._prompts:
            raise ValueError(
                f"a step needs {count + len(taken)} different prompts and data.source has {self._prompts};"
                f" lower batch.promptsPerStep or add prompts"
            )
        used = set(taken)
        chosen: list[int] = []
        deferred: list[int] = []
        waiting = iter(self._deferred)
        while len(chosen) < count:
            prompt = next(waiting, None)
            if prompt is None:
                prompt = self._next()
            if prompt in used:
                deferred.append(prompt)
            else:
                chosen.append(prompt)
                used.add(prompt)
        self._deferred = deferred + list(waiting)
        return chosen

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"epoch": self._epoch, "position": self._position, "deferred": self._deferred}

    def restored(self, state: dict[str, Any]) -> Self:
        """Return a cursor over the same data at a saved position."""
        cursor = type(self)(self._prompts, self._seed, shuffle=self._shuffle, mix=self._mix)
        cursor._epoch, cursor._position = state["epoch"], state["position"]
        cursor._deferred = list(state["deferred"])
        cursor._order = cursor._order_of(cursor._epoch)
        return cursor

    def _next(self) -> int:
        while self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        self._position += 1
        return int(self._order[self._position - 1])

    def prompts_in(self, epochs: int) -> int:
        """Return the number of prompts of the first epochs."""
        if self._mix is None:
            return self._prompts * epochs
        return sum(math.floor(count * weight * epochs) for count, weight in self._mix)

    def _order_of(self, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        if self._mix is not None:
            return self._mixed_order(self._mix, epoch)
        if not self._shuffle:
            return np.arange(self._prompts)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))).permutation(
            self._prompts
        )

    def _mixed_order(self, mix: Sequence[tuple[int, float]], epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return an epoch's prompts. Each source is gone through again and again, and an epoch goes on where the one
        before ended."""
        parts = []
        first = 0
        for source, (count, weight) in enumerate(mix):
            begin, end = (math.floor(count * weight * each) for each in (epoch, epoch + 1))
            places = np.arange(begin, end)
            rows = places % count
            if self._shuffle:
                for turn in np.unique(places // count):
                    seed = np.random.SeedSequence([self._seed, 1, source, int(turn)])
                    order = np.random.Generator(np.random.PCG64(seed)).permutation(count)
                    rows = np.where(places // count == turn, order[places % count], rows)
            parts.append(rows + first)
            first += count
        drawn = np.concatenate(parts)
        if not self._shuffle:
            return drawn
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))).permutation(drawn)
