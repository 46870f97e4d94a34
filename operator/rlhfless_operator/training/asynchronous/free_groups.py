"""The groups of an asynchronous job that go on their own: begun, prepared, taken or dropped. No I/O."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless_functions.api import ExampleSample, GroupResult, PrepareResult
from rlhfless_operator.planner.groups.group_buffer import ChosenGroup, GroupBuffer, GroupName, ReadyGroup, TooStale
from rlhfless_operator.training.journal.async_journal import BegunRollout, TakenStep


@dataclass(frozen=True)
class PreparedGroup:
    """What preparation says of a group."""

    result: GroupResult
    examples: Sequence[ExampleSample]
    """Samples of it for people to read."""


class FreeGroups:
    """All groups of rollouts of which a later step may need any.

    Args:
        size: groups of a step.
        most: the greatest staleness that is allowed.
        rule: what happens where a group would exceed it.
        done: steps that are done.
    """

    def __init__(self, size: int, most: int, rule: TooStale, done: int) -> None:
        self.buffer = GroupBuffer(size, most, rule, settled=done * size)
        self.changed = asyncio.Event()
        """Set when a group is prepared."""
        self.rollouts: dict[int, BegunRollout] = {}
        """By number, those of which groups are left."""
        self.measured: set[int] = set()
        """Those that are complete, and whose lengths are learnt from."""
        self.last = done
        """Number of the newest rollout that is begun."""
        self._prepared: dict[GroupName, PreparedGroup] = {}
        self._taken: dict[GroupName, int] = {}
        """Step that has taken a group; 0 for a group that was dropped and is generated anew."""
        self._dropped: list[GroupName] = []
        self._uncounted = 0
        """Dropped groups that rollouts make anew, and that no step's record counts."""
        self._oldest_of: dict[int, int] = {}
        """Number of the oldest rollout that a step has taken groups of."""

    def begin(self, begun: BegunRollout) -> None:
        """A rollout begins, and it is written down."""
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
        """A chunk of a rollout's groups is prepared."""
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

    def choose(self, step: int) -> list[ChosenGroup] | None:
        """The groups of a step; None while it waits."""
        self.drop(step)
        return self.buffer.choose(step)

    def take(self, taken: TakenStep) -> None:
        """A step takes its groups, and it is written down."""
        names = names_of(taken)
        self.buffer.taken(names)
        self._taken.update(dict.fromkeys(names, taken.step))
        self.remember(taken)

    def remember(self, taken: TakenStep) -> None:
        """A learner may yet take this step again."""
        self._oldest_of[taken.step] = min(name.rollout for name in names_of(taken))

    def learnt(self, taken: TakenStep) -> list[PreparedGroup]:
        """What preparation says of the groups of a step, as far as it is known."""
        return [self._prepared[name] for name in names_of(taken) if name in self._prepared]

    def drop(self, step: int) -> int:
        """Drop what is too stale for a step; returns how many groups wait to be generated anew."""
        stale = self.buffer.drop(step)
        self._dropped += stale
        return len(self._dropped)

    def count_dropped(self) -> int:
        """Dropped groups that the rollouts which have begun since the last call make anew.

        That is written down, and a drop alone is not: a later driver drops such a group again.
        """
        count, self._uncounted = self._uncounted, 0
        return count

    def next_rollout(self, groups: int) -> tuple[list[GroupName], int]:
        """Return what the next rollout draws: the prompts of dropped groups, each prompt once, and so many others.

        Args:
            groups: of all steps of the job.
        """
        return self.buffer.next_rollout(self._dropped, groups)

    # --- what is kept ---

    def finish(self, step: int) -> None:
        """A step is done, and its record made: forget rollouts of which nothing is left."""
        for rollout in [*self.rollouts]:
            if rollout < self._first(step):
                names = [GroupName(rollout, prompt) for prompt in self.rollouts.pop(rollout).prompts or []]
                for name in names:
                    self._prepared.pop(name, None)
                    self._taken.pop(name, None)
                self.measured.discard(rollout)

    def state(self, step: int) -> dict[str, Any]:
        """What `restore` needs once a step is done, as JSON values. What later steps have taken is in their files."""
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
        """Go on from a `state`."""
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

    def needs(self, step: int, checkpoint: int, last: int) -> dict[str, int]:
        """What garbage collection keeps once a step is done.

        Args:
            checkpoint: step of the newest checkpoint.
            last: the newest rollout that may begin before the garbage is collected.
        """
        first = self._first(step)
        self._oldest_of = {number: oldest for number, oldest in self._oldest_of.items() if number > checkpoint}
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
        """The oldest rollout that is not complete, or of which a group is left, once a step is done."""
        left = (
            number
            for number, begun in self.rollouts.items()
            if number not in self.measured or len(self._gone(begun, step)) < len(begun.prompts or [])
        )
        return min(left, default=self.last + 1)


def names_of(taken: TakenStep) -> list[GroupName]:
    """The groups that a step has taken."""
    return [GroupName(group.rollout or taken.step, group.prompt) for group in taken.groups]
