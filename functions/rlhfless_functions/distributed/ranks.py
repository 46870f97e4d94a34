"""Processes that learn together: each holds a part of the weights, the gradients and the optimizer's state."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_T = TypeVar("_T")
_JOINING = timedelta(minutes=2)
"""Longest wait for the others to join, once all of them run."""
_PASSING = timedelta(minutes=10)
"""Longest wait for another rank that lives: it may have to load the model first. One that dies is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that learn together; alone unless told otherwise."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """Of all ranks' devices; None for one alone."""
    control: Any = None
    """Process group for what is no tensor of the model: over the host's memory, whatever the devices are."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")

    def most(self, number: int) -> int:
        """The greatest of all ranks' numbers."""
        return max(self.all(number))

    def all(self, value: _T) -> list[_T]:
        """Every rank's value, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def deal(self, weights: Sequence[int]) -> list[int]:
        """Which of some things are this rank's, so that all ranks have about the same weight: the same on every rank.

        Args:
            weights: of each thing, at least 0.

        Returns:
            Indices, ascending.
        """
        loads = [0] * self.size
        mine = []
        for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
            owner = loads.index(min(loads))
            loads[owner] += weights[index]
            if owner == self.rank:
                mine.append(index)
        return sorted(mine)


def join(folder: Path, rank: int, size: int) -> Ranks:
    """Become one of several ranks of this host; returns when all are there.

    Args:
        folder: private and new, where the ranks find each other.
        rank: of this process.
        size: ranks in all.

    Raises:
        RuntimeError: if the others do not come in time.
    """
    if sys.platform == "linux":
        # The ranks are on one host: nobody else is to reach them, and no name has to be resolved.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "ranks"), size)
    store.set_timeout(_JOINING)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PASSING)
    return Ranks(rank, size, init_device_mesh(kind, (size,)), dist.new_group(backend="gloo", timeout=_PASSING))
