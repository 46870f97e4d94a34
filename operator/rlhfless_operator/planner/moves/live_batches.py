"""The groups that join live batches, and the batches that are emptied for others. Pure.

An instance holds one version of the weights at a time. So a batch has samples of one version, and takes another version
once it is empty. Groups of the newest version go to the batch with the most room, those of an older one to a batch that
has this version, if one has room. If a group finds no batch, the samples of another version are gathered: the batch
with the fewest of them is emptied, if others of its version have room for them. So the last samples of a version are on
as few instances as their number needs.

A group that no batch has the version of, and that is older than all others, was lost with its instance. The batch with
the fewest newer samples is emptied for it. Groups after it that were to join that batch wait again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Batch:
    """The batch of one actor that samples may join."""

    version: int
    """Version of its weights."""
    samples: int
    """Unfinished samples, without those that leave it."""
    room: int
    """Number of samples that may join it now."""


@dataclass(frozen=True)
class WaitingGroup:
    """Samples that no batch has."""

    version: int
    """Version that samples them."""
    samples: int


@dataclass(frozen=True)
class Give:
    """A group joins a batch, which takes the group's version first if it has another one."""

    group: int
    batch: int


@dataclass(frozen=True)
class Empty:
    """All samples leave a batch, and wait again."""

    batch: int


def deal(
    batches: Sequence[Batch], groups: Sequence[WaitingGroup], *, may_open: bool, gathers: bool
) -> list[Give | Empty]:
    """Return what to do, in order. Groups and batches are named by their places in the arguments.

    Args:
        batches: those that samples may join.
        groups: in the order in which they begin.
        may_open: whether another actor opens for groups that find no batch.
        gathers: whether to gather samples though no group waits, because none comes any more.
    """
    held, left = list(batches), list(range(len(groups)))
    newest = max([*(each.version for each in batches), *(each.version for each in groups)], default=0)
    commands: list[Give | Empty] = []
    while True:
        left = _give(held, groups, left, newest, commands)
        if (left and may_open) or not (left or gathers):
            return commands
        given = [command for command in commands if isinstance(command, Give)]
        waiting = {groups[index].version for index in left}
        emptied = _least_to_gather(held, waiting, joined={each.batch for each in given})
        if emptied is not None:
            _make_room(held, emptied)
        elif left:
            earlier = {each.batch for each in given if each.group < left[0]}
            emptied = _newer_than(held, groups[left[0]].version, joined=earlier)
            left = sorted([*left, *_taken_back(held, groups, commands, emptied)])
        if emptied is None:
            return commands
        commands.append(Empty(emptied))
        # Without a group that waits, its actor ends.
        held[emptied] = replace(held[emptied], samples=0, room=held[emptied].room if left else 0)


def _give(
    held: list[Batch], groups: Sequence[WaitingGroup], left: list[int], newest: int, commands: list[Give | Empty]
) -> list[int]:
    """Let groups join batches as far as there is room; return those that are left."""
    waiting = []
    for index in left:
        group = groups[index]
        if (at := _place(held, group, spreads=group.version == newest)) is None:
            waiting.append(index)
            continue
        commands.append(Give(index, at))
        batch = held[at]
        held[at] = Batch(group.version, batch.samples + group.samples, max(0, batch.room - group.samples))
    return waiting


def _place(held: Sequence[Batch], group: WaitingGroup, *, spreads: bool) -> int | None:
    """Return the batch that a group joins, if there is one."""
    same = [
        at
        for at, each in enumerate(held)
        if each.samples and each.version == group.version and each.room >= group.samples
    ]
    empty = [at for at, each in enumerate(held) if not each.samples]
    able = same + empty if spreads or not same else same
    return max(able, key=lambda at: (held[at].room, held[at].version == group.version), default=None)


def _taken_back(
    held: list[Batch], groups: Sequence[WaitingGroup], commands: list[Give | Empty], batch: int | None
) -> list[int]:
    """Let the groups that were to join a batch wait again; return them."""
    back = [command for command in commands if isinstance(command, Give) and command.batch == batch]
    for command in back:
        commands.remove(command)
        samples, each = groups[command.group].samples, held[command.batch]
        held[command.batch] = replace(each, samples=each.samples - samples, room=each.room + samples)
    return [command.group for command in back]


def _least_to_gather(held: Sequence[Batch], waiting: set[int], *, joined: set[int]) -> int | None:
    """Return the batch with the fewest samples that others of its version have room for, unless groups of it wait.

    Args:
        waiting: versions of the groups that wait.
        joined: batches that groups have just joined. They are not emptied again.
    """
    found = []
    for at, each in enumerate(held):
        if at not in joined and each.samples and each.version not in waiting and _room_beside(held, at) >= each.samples:
            found.append(at)
    return min(found, key=lambda at: held[at].samples, default=None)


def _others(held: Sequence[Batch], at: int) -> list[int]:
    version = held[at].version
    return [other for other, each in enumerate(held) if other != at and each.samples and each.version == version]


def _room_beside(held: Sequence[Batch], at: int) -> int:
    return sum(held[other].room for other in _others(held, at))


def _make_room(held: list[Batch], at: int) -> None:
    """Take the room that a batch's samples need from the others of its version."""
    needed = held[at].samples
    for other in sorted(_others(held, at), key=lambda each: -held[each].room):
        taken = min(needed, held[other].room)
        held[other] = replace(held[other], samples=held[other].samples + taken, room=held[other].room - taken)
        needed -= taken


def _newer_than(held: Sequence[Batch], version: int, *, joined: set[int]) -> int | None:
    """Return the batch with the fewest samples of newer versions, unless one has this version.

    Args:
        joined: batches that groups before this one have just joined. They are not emptied again.
    """
    if any(each.samples and each.version == version for each in held):
        return None
    newer = [at for at, each in enumerate(held) if at not in joined and each.samples and each.version > version]
    return min(newer, key=lambda at: held[at].samples, default=None)
