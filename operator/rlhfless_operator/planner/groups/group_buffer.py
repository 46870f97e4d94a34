"""The choice of the groups that an asynchronous step learns from: complete ones, the oldest weights first. Pure.

Rollouts begin as many groups as admission allows. Groups become complete in any order, and each waits here until a step
takes it. A step takes all of its groups at once, or in pieces as they come, or it waits (`async.tooStale`).

A group whose oldest token is of version v may be learnt from up to step v + 1 + S, with S the greatest staleness that
is allowed. This step is the group's *deadline*. With `wait` every group keeps its deadline: groups are taken only if
the rest of the step and the steps after it have room for all other groups before their deadlines. If the oldest
complete groups do not satisfy that, no others do. Once all groups are complete they satisfy it, because admission never
begins more groups than all steps up to the newest deadline have room for.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhfless_operator.planner.groups.staleness import staleness

TooStale = Literal["wait", "drop", "downweight"]
"""Rule for a group that would become too stale; see `AsyncSpec.too_stale`."""
PIECES = 8
"""Most pieces of a step's groups. Smaller ones would leave some of a learner's GPUs idle for longer."""


@dataclass(frozen=True, order=True)
class GroupName:
    """A group: one prompt of one rollout."""

    rollout: int
    """Number of the rollout that draws the prompt, from 1."""
    prompt: int
    """Row of the prompt in the dataset."""


@dataclass(frozen=True)
class ReadyGroup:
    """A complete and prepared group."""

    name: GroupName
    version: int
    """Version of the oldest weights that sampled any of it."""
    part: str
    """URI of the prepared part that holds it."""


@dataclass(frozen=True)
class ChosenGroup:
    """A group that a step learns from."""

    group: ReadyGroup
    factor: float = 1.0
    """Factor of its advantages."""


def piece_size(size: int) -> int:
    """Return the fewest groups that a learner begins with, of a step that learns from `size` groups."""
    return -(-size // PIECES)


@dataclass
class GroupBuffer:
    """The groups that were begun and that no step has taken.

    Args:
        size: number of groups of a step.
        most: the greatest staleness that is allowed.
        rule: for a group that would exceed it.
        settled: number of groups that were taken before.
        least: fewest groups that a step takes at a time; 0 if it takes all of them at once.
    """

    size: int
    most: int
    rule: TooStale = "wait"
    settled: int = 0
    least: int = 0
    _under_way: dict[GroupName, int] = field(default_factory=dict)
    """Groups that are not complete, with the version that began their rollout. None of their tokens is older."""
    _ready: dict[GroupName, ReadyGroup] = field(default_factory=dict)

    @property
    def live(self) -> int:
        """Number of groups that were begun and not dropped, including those that were taken."""
        return self.settled + len(self._under_way) + len(self._ready)

    def has_enough(self, held: int = 0) -> bool:
        """Return whether enough groups are complete for a step that has taken `held` groups."""
        return len(self._ready) >= self._least(held)

    def admits(self, groups: int, done: int, ahead: int) -> bool:
        """Return whether `groups` more groups may begin with the newest weights.

        Args:
            groups: their number.
            done: number of steps that are done.
            ahead: number of steps that generation may be ahead of the learner, at most `most`.
        """
        return self.live + groups <= (done + 1 + ahead) * self.size

    def admits_rollout(self, admitted: int, total: float, done: int, ahead: int) -> bool:
        """Return whether one more rollout may begin with the newest weights.

        Args:
            admitted: number of rollouts that may begin and have not begun.
            total: number of groups that all steps of the job learn from.
            done: number of steps that are done.
            ahead: number of steps that generation may be ahead of the learner, at most `most`.
        """
        waiting = admitted * self.size
        groups = min(self.size, total - self.live - waiting)
        return groups > 0 and self.admits(waiting + int(groups), done, ahead)

    def next_rollout(self, dropped: Sequence[GroupName], total: float) -> tuple[list[GroupName], int]:
        """Return the dropped groups whose prompts the next rollout draws, each prompt once, and its number of new
        prompts.

        Args:
            dropped: groups to be generated anew, in order.
            total: number of groups that all steps of the job learn from.
        """
        most = min(self.size, total - self.live)
        again: dict[int, GroupName] = {}
        for name in dropped:
            if len(again) < most:
                again.setdefault(name.prompt, name)
        # A prompt that was dropped twice keeps its place for a later rollout.
        left = total - self.live - len(dropped)
        return list(again.values()), int(min(most - len(again), left))

    def begin(self, rollout: int, prompts: Iterable[int], version: int) -> None:
        """Record that a rollout begins its groups with a version of the weights."""
        self._under_way.update({GroupName(rollout, prompt): version for prompt in prompts})

    def complete(self, group: ReadyGroup) -> None:
        """Record that a group is prepared. A group that is not, or no longer, under way is ignored."""
        if self._under_way.pop(group.name, None) is not None:
            self._ready[group.name] = group

    def taken(self, names: Iterable[GroupName]) -> None:
        """Record that a step has taken these groups, complete here or not."""
        for name in names:
            if self._under_way.pop(name, None) is not None or self._ready.pop(name, None) is not None:
                self.settled += 1

    def forget(self, name: GroupName) -> None:
        """Remove a group that was settled before, or that is dropped and generated anew."""
        self._under_way.pop(name, None)
        self._ready.pop(name, None)

    def choose(self, step: int, held: int = 0) -> list[ChosenGroup]:
        """Return all groups that a step may take now, in the order of learning; none while it waits for more.

        The groups stay in the buffer until `taken` is called.

        Args:
            step: its number: one more than the number of steps that have all of their groups.
            held: number of groups that it has taken.
        """
        oldest = sorted(self._ready.values(), key=_oldest_first)[: self.size - held]
        if self.rule == "wait":
            # What leaves no room leaves none with another group either.
            most = bisect_left(range(len(oldest)), 1, key=lambda i: not self._leaves_room(step, held, oldest[: i + 1]))
            oldest = oldest[:most]
        if len(oldest) < self._least(held):
            return []
        return [ChosenGroup(group, self._factor(step, group)) for group in oldest]

    def drop(self, step: int) -> list[GroupName]:
        """Remove the complete groups that are too stale for a step and for all later ones (only with `drop`).

        Returns:
            Their names, in order. Their prompts must be generated anew.
        """
        if self.rule != "drop":
            return []
        stale = sorted(name for name, group in self._ready.items() if staleness(step, group.version) > self.most)
        for name in stale:
            del self._ready[name]
        return stale

    def _least(self, held: int) -> int:
        return min(self.least or self.size, self.size - held)

    def _leaves_room(self, step: int, held: int, chosen: Sequence[ReadyGroup]) -> bool:
        """Return whether the rest of this step and the steps after it have room for all other groups, each up to its
        deadline."""
        names = {group.name for group in chosen}
        left = self.size - held - len(chosen)
        versions = [version for name, version in self._under_way.items()]
        versions += [group.version for name, group in self._ready.items() if name not in names]
        deadlines = sorted(version + 1 + self.most for version in versions)
        return all(count <= (deadline - step) * self.size + left for count, deadline in enumerate(deadlines, start=1))

    def _factor(self, step: int, group: ReadyGroup) -> float:
        stale = staleness(step, group.version)
        return (1 + self.most) / (1 + stale) if stale > self.most else 1.0


def _oldest_first(group: ReadyGroup) -> tuple[int, int, int]:
    return group.version, group.name.rollout, group.name.prompt
