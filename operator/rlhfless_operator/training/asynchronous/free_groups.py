"""The groups of an asynchronous job that any later step may take: begun, prepared, taken or dropped. No I/O."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless_functions.api import ExampleSample, GroupResult, PrepareResult
from rlhfless_operator.planner.groups.group_buffer import ChosenGroup, GroupBuffer, GroupName, ReadyGroup, TooStale
from rlhfless_operator.training.journal.async_journal import BegunRollout, TakenGroup, TakenStep


@dataclass(frozen=True)
class PreparedGroup:
    """The outcome of preparing one group."""

    result: GroupResult
    examples: Sequence[ExampleSample]
    """Its samples for people to read."""


class FreeGroups:
    """The groups of all rollouts that later steps may still need.

    Args:
        size: groups of a step.
        most: the greatest staleness that is allowed.
        rule: the action when a group would exceed it.
        done: steps that are done.
        least: fewest groups that a step takes at a time; 0 if it takes all of them at once.
    """

    def __init__(self, size: int, most: int, rule: TooStale, done: int, *, least: int = 0) -> None:
        self.buffer = GroupBuffer(size, most, rule, settled=done * size, least=least)
        self.in_pieces = least > 0
        """Whether a step takes its groups piece by piece."""
        self.changed = asyncio.Event()
        """Set when a group is prepared."""
        self.rollouts: dict[int, BegunRollout] = {}
        """Rollouts with groups that are left, by number."""
        self.measured: set[int] = set()
        """Complete rollouts whose lengths are learnt from."""
        self.last = done
        """Number of the newest rollout that has begun."""
        self._prepared: dict[GroupName, PreparedGroup] = {}
        self._taken: dict[GroupName, int] = {}
        """Step that has taken each group; 0 for a group that was dropped and is generated again."""
        self._dropped: list[GroupName] = []
        self._uncounted = 0
        """Number of dropped groups that rollouts generate again and that no step's record counts yet."""
        self._oldest_of: dict[int, int] = {}
        """Number of the oldest rollout that each step has taken groups of."""

    def begin(self, begun: BegunRollout) -> None:
        """Note that a rollout has begun and is written down."""
        assert begun.prompts is not None
        self.rollouts[begun.step] = begun
        self.last = max(self.last, begun.step)
        self.buffer.begin(begun.step, begun.prompts, begun.policy.version)
        for name in begun.again:
            self._taken[name] = 0
            self.buffer.forget(name)
        self._dropped = [name for name in self._dropped if name not in begun.again]
        self._uncounted += len(begun.again)

    def prepared(self, rollout: int, chunk: PrepareResult) -> None:
        """Take in a prepared chunk of a rollout's groups."""
        begun = self.rollouts[rollout]
        for result in chunk.groups:
            name = GroupName(rollout, result.prompt)
            if name in self._prepared:
                continue
            self._prepared[name] = PreparedGroup(result, [each for each in chunk.examples if each.row == result.prompt])
            # An emulated preparation does not tell versions.
            version = result.sampled[0].version if result.sampled else begun.policy.version
            self.buffer.complete(ReadyGroup(name, version, chunk.part))
        self.changed.set()

    def choose(self, step: int, held: int = 0) -> list[ChosenGroup]:
        """Return the groups of a step that has taken `held` already; none while it has to wait."""
        self.drop(step)
        return self.buffer.choose(step, held)

    def take(self, step: int, groups: Iterable[TakenGroup]) -> None:
        """Note that a step takes groups, and that this is written down."""
        names = [_name(step, group) for group in groups]
        self.buffer.taken(names)
        self._taken.update(dict.fromkeys(names, step))

    def remember(self, taken: TakenStep) -> None:
        """Keep the groups of a step that a learner may take again, once all of them are taken."""
        self._oldest_of[taken.step] = min(name.rollout for name in names_of(taken))

    def learnt(self, taken: TakenStep) -> list[PreparedGroup]:
        """Return the prepared groups of a step, as far as they are known."""
        return [self._prepared[name] for name in names_of(taken) if name in self._prepared]

    def drop(self, step: int) -> int:
        """Drop the groups that are too stale for a step; return how many groups wait to be generated again."""
        stale = self.buffer.drop(step)
        self._dropped += stale
        return len(self._dropped)

    def count_dropped(self) -> int:
        """Return how many dropped groups are generated again by the rollouts that have begun since the last call.

        These are written down with the rollout. A drop alone is not: a later driver drops such a group again.
        """
        count, self._uncounted = self._uncounted, 0
        return count

    def next_rollout(self, groups: int) -> tuple[list[GroupName], int]:
        """Return the dropped groups whose prompts the next rollout draws again, each prompt once, and how many other
        prompts it draws.

        Args:
            groups: of all steps of the job.
        """
        return self.buffer.next_rollout(self._dropped, groups)

    # --- what is kept ---

    def finish(self, step: int) -> None:
        """Forget the rollouts of which no group is left, after a step is done and its record made."""
        for rollout in [*self.rollouts]:
            if rollout < self._first(step):
                names = [GroupName(rollout, prompt) for prompt in self.rollouts.pop(rollout).prompts or []]
                for name in names:
                    self._prepared.pop(name, None)
                    self._taken.pop(name, None)
                self.measured.discard(rollout)

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON values that `restore` needs once a step is done. The groups that later steps have taken are
        in their files."""
        first = self._first(step)
        return {
            "last": self.last,
            "dropped": self._uncounted,
            "rollouts": [
                {
                    "begun": begun.model_dump(mode="json"),
                    "gone": sorted(self._gone(begun, step)),
                    "measured": number in self.measured,
                }
                for number, begun in sorted(self.rollouts.items())
                if number >= first
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        for entry in state["rollouts"]:
            begun = BegunRollout.model_validate(entry["begun"])
            self.begin(begun)
            for prompt in entry["gone"]:
                name = GroupName(begun.step, prompt)
                self._taken[name] = 0
                self.buffer.forget(name)
            if entry["measured"]:
                self.measured.add(begun.step)
        self.last = state["last"]
        self._uncounted = state["dropped"]

    def needs(self, step: int, repeated: int, last: int) -> dict[str, int]:
        """Return what garbage collection keeps once a step is done.

        Args:
            repeated: the first step that a learner may repeat.
            last: the newest rollout that may begin before the garbage is collected.
        """
        first = self._first(step)
        self._oldest_of = {number: oldest for number, oldest in self._oldest_of.items() if number >= repeated}
        versions = [begun.policy.version for number, begun in self.rollouts.items() if number >= first]
        return {
            "rollout": first,
            "last": last,
            "batch": min([first, *self._oldest_of.values()]),
            "version": min([step, *versions]),
        }

    def _gone(self, begun: BegunRollout, step: int) -> Collection[int]:
        return [
            prompt for prompt in begun.prompts or [] if self._taken.get(GroupName(begun.step, prompt), step + 1) <= step
        ]

    def _first(self, step: int) -> int:
        """Return the oldest rollout that is incomplete or has groups left, once a step is done."""
        left = (
            number
            for number, begun in self.rollouts.items()
            if number not in self.measured or len(self._gone(begun, step)) < len(begun.prompts or [])
        )
        return min(left, default=self.last + 1)


def names_of(taken: TakenStep) -> list[GroupName]:
    """Return the groups that a step has taken."""
    return [_name(taken.step, group) for group in taken.groups]


def _name(step: int, group: TakenGroup) -> GroupName:
    return GroupName(group.rollout or step, group.prompt)
