"""Processes that learn together. Each holds a part of the weights, the gradients and the optimizer's state."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_T = TypeVar("_T")
_JOINING = timedelta(minutes=2)
"""Longest wait for the others to join, once all of them run."""
_PASSING = timedelta(minutes=10)
"""Longest wait for a live rank, which may have to load the model first. A rank that dies is noticed immediately."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that learn together; by default it is alone."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """Process group of all ranks' devices; None for a single rank."""
    control: Any = None
    """Process group for data other than the model's tensors. It always uses the host's memory."""
    of_instance: int | None = None
    """Ranks of each instance; by default all of them."""
    own: Any = None
    """Process group of this instance's ranks, if there are several instances."""

    @property
    def place(self) -> int:
        """Number of this rank within its instance."""
        return self.rank % (self.of_instance or self.size)

    @property
    def instance(self) -> int:
        """Number of this rank's instance."""
        return self.rank // (self.of_instance or self.size)

    @property
    def instances(self) -> int:
        """Number of instances of the ranks."""
        return self.size // (self.of_instance or self.size)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return torch.device("cuda", self.place) if torch.cuda.is_available() else torch.device("cpu")

    def all(self, value: _T) -> list[_T]:
        """Return every rank's value, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def await_own(self) -> None:
        """Wait until every rank of this instance calls this. Then none of them owes other instances a part of what was
        exchanged before, and the instance may end them.

        A rank returns from an exchange once it has every value, while another rank of its instance may still have to
        pass values on.
        """
        if self.own is not None:
            dist.barrier(group=self.own)

    def deal(self, weights: Sequence[int]) -> list[int]:
        """Divide items among the ranks, with about the same weight for each. Every rank computes the same division.

        Args:
            weights: weight of each item, at least 0.

        Returns:
            Indices of this rank's items, ascending.
        """
        loads = [0] * self.size
        mine = []
        for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
            owner = loads.index(min(loads))
            loads[owner] += weights[index]
            if owner == self.rank:
                mine.append(index)
        return sorted(mine)


@dataclass(frozen=True)
class Seat:
    """A process's number among the ranks, and where it finds the others."""

    rank: int
    size: int
    """Ranks in all."""
    folder: str | None = None
    """A private new folder in which the ranks of one host find each other."""
    of_instance: int | None = None
    """Ranks of each instance, if there are several instances."""
    host: str = ""
    """Address of the store in which the ranks of several instances find each other."""
    port: int = 0
    group: str = ""
    """Name of these ranks in that store."""
    interface: str | None = None
    """Network interface that leads to the other ranks; by default torch's choice."""

    @property
    def place(self) -> int:
        """Number of this rank within its instance."""
        return self.rank % (self.of_instance or self.size)

    def store(self) -> dist.Store:
        """Return the store in which the ranks find each other."""
        if self.folder is not None:
            store = dist.FileStore(f"{self.folder}/ranks", self.size)
            store.set_timeout(_JOINING)
            return store
        return dist.PrefixStore(self.group, dist.TCPStore(self.host, self.port, is_master=False, timeout=_JOINING))


def join(seat: Seat) -> Ranks:
    """Become one of several ranks. Returns when all have joined.

    Raises:
        RuntimeError: the others do not join in time.
    """
    # If all ranks are on one host, loopback keeps other hosts out and needs no name resolution.
    interface = "lo" if seat.folder is not None and sys.platform == "linux" else seat.interface
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(seat.place)
    backend = "nccl" if kind == "cuda" else "gloo"
    store = seat.store()
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size, timeout=_PASSING)
    mesh = init_device_mesh(kind, (seat.size,))
    control = dist.new_group(backend="gloo", timeout=_PASSING)
    ranks = Ranks(seat.rank, seat.size, mesh, control, seat.of_instance)
    if ranks.instances == 1:
        return ranks
    everyone, share = range(seat.size), seat.size // ranks.instances
    instances = [list(everyone[first : first + share]) for first in everyone[::share]]
    own, _ = dist.new_subgroups_by_enumeration(instances, timeout=_PASSING, backend="gloo")
    return replace(ranks, own=own)
