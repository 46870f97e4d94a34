"""The position in the training data. It is part of the checkpoint: no prompt is skipped or repeated."""

from collections.abc import Collection
from typing import Any, Self

import numpy as np


class DataCursor:
    """Draws prompts epoch by epoch, each exactly once an epoch, and never the same one twice in a step.

    Args:
        prompts: number of prompts in the dataset.
        seed: the job's seed; with the epoch it makes the order.
        shuffle: draw in a new order in each epoch, or in the dataset's.
    """

    def __init__(self, prompts: int, seed: int, *, shuffle: bool) -> None:
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
        cursor = type(self)(self._prompts, self._seed, shuffle=self._shuffle)
        cursor._epoch, cursor._position = state["epoch"], state["position"]
        cursor._deferred = list(state["deferred"])
        cursor._order = cursor._order_of(cursor._epoch)
        return cursor

    def _next(self) -> int:
        if self._position == self._prompts:
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        self._position += 1
        return int(self._order[self._position - 1])

    def _order_of(self, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        if not self._shuffle:
            return np.arange(self._prompts)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))).permutation(
            self._prompts
        )
