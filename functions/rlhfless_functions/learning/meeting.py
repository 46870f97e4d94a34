"""The meeting of a gang's instances before each step: they find each other and agree on their ranks.

The first one opens a torch TCPStore on its own address and writes the address into the job's folder. Each publishes in
the store its version and the state that it holds. If all hold the state of one group, they continue as that group;
otherwise they form a new one. A waiting instance can be cut at any moment.
"""

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import transformers
from pydantic import BaseModel

import rlhfless_functions
from rlhfless_functions import artifacts
from rlhfless_functions.api import PROTOCOL, Gang, TaskKey, Waiting
from rlhfless_functions.distributed.ranks import Seat
from rlhfless_functions.runtime.addresses import own_address
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskContext, TaskError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_STUCK_SECONDS = 10.0
"""Seconds that a task may continue after it was told to stop."""
_CONNECT_SECONDS = 2.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Held:
    """An instance's part of the state of a group that has learnt together before."""

    group: str
    number: int
    """Number of the instance in the group."""
    state: str
    """Name of the group's state."""


@dataclass(frozen=True)
class Place:
    """An instance's place in its gang."""

    seat: Seat
    """Number of its first rank."""
    kept: bool
    """Whether all instances of the gang hold the state of one group."""
    store: dist.Store | None = None
    """The store that the first instance keeps open as long as the group lasts."""


class _Arrival(BaseModel):
    processes: int
    versions: dict[str, str]
    held: Held | None


@cache
def versions() -> dict[str, str]:
    """Return the versions that must be equal on all instances of a gang. Images have no metadata of rlhfless, so its
    code counts."""
    code = hashlib.sha256()
    for file in sorted(Path(rlhfless_functions.__path__[0]).rglob("*.py")):
        code.update(file.read_bytes())
    found = {"rlhfless": f"code {code.hexdigest()[:12]}"}
    return {"protocol": PROTOCOL, **found, "torch": torch.__version__, "transformers": transformers.__version__}


def meet(gang: Gang, key: TaskKey, processes: int, held: Held | None, host: str, context: TaskContext) -> Place:
    """Wait for the other instances. Returns this instance's place among them.

    Args:
        gang: the expected instances.
        key: key of the task, for messages.
        processes: ranks of this instance.
        held: the state in memory; None if there is no usable one.
        host: address that its server listens on.
        context: says whether to stop; the wait is reported to it.

    Raises:
        TaskError: the others did not come in time, can't be reached or are of another version; or told to stop.
    """
    waiting = _Patience(gang, key, context)
    context.emit(Waiting(waiting=True))
    try:
        if gang.number == 0:
            store, address = _open(host)
            with store_errors():
                artifacts.write_json(gang.meeting, {"host": address[0], "port": address[1]})
        else:
            store, address = _find(gang, waiting)
        arrivals = _exchange(store, gang, _Arrival(processes=processes, versions=versions(), held=held), waiting)
    finally:
        context.emit(Waiting(waiting=False))
    _check_alike(arrivals)
    holders = [arrival.held for arrival in arrivals if arrival.held is not None]
    states, numbers = {(each.group, each.state) for each in holders}, {each.number for each in holders}
    kept = held if len(states) == 1 and len(numbers) == gang.size else None
    seat = Seat(
        rank=(gang.number if kept is None else kept.number) * processes,
        size=gang.size * processes,
        of_instance=processes,
        host=address[0],
        port=address[1],
        group=gang.meeting if kept is None else kept.group,
        interface=_interface(host, address[0]),
    )
    return Place(seat, kept is not None, store if gang.number == 0 and kept is None else None)


@contextmanager
def ends_where_stuck(gang: Gang | None, context: TaskContext) -> Iterator[None]:
    """End the process if a task of a gang continues long after it was told to stop.

    Ranks that wait for a lost rank can't be interrupted, and on GPUs they may wait forever. The process's state is then
    unusable.
    """
    over = threading.Event()

    def watch() -> None:
        while context.stop_reason is None:
            if over.wait(0.5):
                return
        if not over.wait(_STUCK_SECONDS):
            logger.error("this instance ends, because it waits for another one that is gone")
            os._exit(1)

    if gang is not None:
        threading.Thread(target=watch, name="gang-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class _Patience:
    """An instance's wait for the others."""

    def __init__(self, gang: Gang, key: TaskKey, context: TaskContext) -> None:
        self._gang, self._key, self._context = gang, key, context
        self._deadline = time.monotonic() + gang.within_seconds

    def until(self, condition: Callable[[], bool], lacking: Callable[[], str]) -> None:
        """Wait.

        Args:
            condition: the condition to wait for.
            lacking: returns what is missing and what to do about it, after a timeout.

        Raises:
            TaskError: it took too long, or the task was told to stop.
        """
        while not condition():
            if self._context.stop_reason is not None:
                raise TaskError(
                    "drained",
                    f"step {self._key.step} was interrupted by a {self._context.stop_reason} while the instance waited"
                    " for the others; take it again",
                    retryable=True,
                )
            if time.monotonic() > self._deadline:
                gang = self._gang
                raise TaskError(
                    "internal",
                    f"instance {gang.number + 1} of {gang.size} learning instances waited for"
                    f" {gang.within_seconds:g} s: {lacking()}",
                    retryable=True,
                )
            time.sleep(_POLL_SECONDS)


def _open(host: str) -> tuple[dist.TCPStore, tuple[str, int]]:
    """Return a store of this process, on the address at which the others reach it."""
    own = _LOOPBACK if host == _LOOPBACK else own_address()
    listening = socket.create_server((own, 0))
    port: int = listening.getsockname()[1]
    timeout = timedelta(seconds=30)
    store = dist.TCPStore(
        own, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )
    return store, (own, port)


def _find(gang: Gang, waiting: _Patience) -> tuple[dist.TCPStore, tuple[str, int]]:
    def written() -> bool:
        with store_errors():
            return artifacts.exists(gang.meeting)

    waiting.until(written, lambda: "the first one has not published its address; see its log")
    with store_errors():
        said = artifacts.read_json(gang.meeting)
    address: tuple[str, int] = (said["host"], said["port"])

    def reached() -> bool:
        try:
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    waiting.until(
        reached,
        lambda: (
            f"it can't connect to the first one at {address[0]}:{address[1]}; let the job's learning pods reach each"
            " other on every port (a NetworkPolicy may block them), or set learning.instances.max to 1"
        ),
    )
    return dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30)), address


def _exchange(store: dist.TCPStore, gang: Gang, own: _Arrival, waiting: _Patience) -> list[_Arrival]:
    """Return the published data of every instance, in the order of their numbers."""
    names = [f"arrival/{number}" for number in range(gang.size)]
    store.set(names[gang.number], own.model_dump_json())

    def missing() -> str:
        absent = [str(number + 1) for number, name in enumerate(names) if not store.check([name])]
        return f"number {', '.join(absent)} did not join; a learning pod may lack room, or hang"

    try:
        waiting.until(lambda: store.check(names), missing)
        arrivals = [_Arrival.model_validate_json(store.get(name)) for name in names]
        # The first one's store closes with the task, but not before all have read it.
        store.add("read", 1)
        if gang.number == 0:
            waiting.until(lambda: store.add("read", 0) == gang.size, lambda: "another one is gone; take the step again")
    except RuntimeError as error:
        raise TaskError(
            "internal", f"another instance of the gang is gone ({error}); take the step again", retryable=True
        ) from error
    return arrivals


def _check_alike(arrivals: list[_Arrival]) -> None:
    first = arrivals[0]
    for number, other in enumerate(arrivals[1:], 2):
        for name in {**first.versions, **other.versions}:
            one, another = first.versions.get(name), other.versions.get(name)
            if one != another:
                raise TaskError(
                    "bad_request",
                    f"instances of different versions can't learn together: number 1 has {name} {one}, number {number}"
                    f" has {another}; give all learning pods one image, by its digest, and delete the older pods",
                )
        if other.processes != first.processes:
            raise TaskError(
                "bad_request",
                "instances that learn together need the same number of processes: number 1 has"
                f" {first.processes}, number {number} has {other.processes}; set learning.processes, or give their"
                " pods the same GPUs",
            )


def _interface(host: str, other: str) -> str | None:
    """Return the network interface that leads to an address of a gang; None if unknown."""
    own = _LOOPBACK if host == _LOOPBACK or other == _LOOPBACK else own_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == own for each in addresses):
            return name
    return None
