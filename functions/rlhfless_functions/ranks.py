"""Processes that learn together: each holds a part of the weights, the gradients and the optimizer's state.

The instance is rank 0; it starts the others when a request asks for them and tells them every request, so that all of
them take the same steps. It does what torchrun would do, since only a request says how many there are, and an instance
may be a fork of a template. Whatever goes wrong in one ends all of them, and the next attempt begins with new ones from
the newest checkpoint.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlhfless_functions.task import TaskError

_T = TypeVar("_T")
_TIMEOUT = timedelta(minutes=10)
"""Longest wait of one rank for another."""


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


def join(store: dist.TCPStore, rank: int, size: int) -> Ranks:
    """Become one of several ranks; returns when all are there."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT
    )
    return Ranks(rank, size, init_device_mesh(kind, (size,)), dist.new_group(backend="gloo", timeout=_TIMEOUT))


class Team:
    """Rank 0's hold on the other ranks.

    Args:
        size: ranks in all, at least 2.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        threads = str(torch.get_num_threads())
        self._others = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rlhfless_functions.learning_rank",
                    str(store.port),
                    str(rank),
                    str(size),
                    threads,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, size)
        ]
        try:
            self.ranks = join(store, 0, size)
        except BaseException:
            self.end()
            raise

    def tell(self, line: str) -> None:
        """Hand a request to every other rank.

        Raises:
            TaskError: if one of them is gone.
        """
        try:
            for process in self._others:
                assert process.stdin is not None
                process.stdin.write(line + "\n")
                process.stdin.flush()
        except OSError as error:
            raise TaskError(
                "internal", f"a learning process is gone ({error}): take the step again", retryable=True
            ) from error

    def failure(self) -> TaskError | None:
        """What another rank said before it ended, if one did."""
        for process in self._others:
            process.kill()
            process.wait()
            assert process.stdout is not None
            said = process.stdout.read().strip().splitlines()
            if said:
                told = json.loads(said[-1])
                return TaskError(told["reason"], told["message"], retryable=told["retryable"])
        return None

    def end(self) -> None:
        """End the other ranks, and be alone again."""
        for process in self._others:
            process.kill()
        for process in self._others:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except OSError:
                    continue  # what was not yet read by a rank that is gone
        if dist.is_initialized():
            dist.destroy_process_group()
