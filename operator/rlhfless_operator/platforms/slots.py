"""Slots: GPUs that instances use in turns. Which instance has which slots, and which one is awake on each.

On one machine a slot is a GPU, on a cluster a ResourceClaim. Among the jobs of a cluster `planner/turns.py` decides
whose turn it is; among the stages of one job on one machine `displaced_by_waking` does.
"""

from collections.abc import Collection, Mapping, Sequence


class SlotAccount:
    """Which slots are whose. An instance has the same ones all its life, also after it has slept.

    Args:
        slots: their names.
    """

    def __init__(self, slots: Sequence[str] = ()) -> None:
        self._holders: dict[str, str | None] = dict.fromkeys(slots)
        self._homes: dict[str, tuple[str, ...]] = {}

    def __contains__(self, instance: str) -> bool:
        return instance in self._homes

    @property
    def homes(self) -> Mapping[str, tuple[str, ...]]:
        """The slots of every instance, in use or not."""
        return self._homes

    @property
    def holders(self) -> Mapping[str, str | None]:
        """Who uses each slot."""
        return self._holders

    @property
    def any(self) -> bool:
        """Whether there are slots at all."""
        return bool(self._holders)

    def of(self, instance: str) -> tuple[str, ...]:
        """An instance's slots, in use or not."""
        return self._homes.get(instance, ())

    def place(self, instance: str, slots: Collection[str]) -> None:
        """A fresh instance has these slots from now on, and sleeps. Slots that were not known are known now."""
        for slot in slots:
            self._holders.setdefault(slot, None)
        self._homes[instance] = tuple(slot for slot in self._holders if slot in slots)

    def sleep(self, instance: str) -> None:
        """An instance uses its slots no longer."""
        for slot in self.of(instance):
            if self._holders[slot] == instance:
                self._holders[slot] = None

    def wake(self, instance: str) -> bool:
        """A sleeping instance is to use its slots again; False while others use any of them."""
        if any(self._holders[slot] not in (None, instance) for slot in self.of(instance)):
            return False
        for slot in self.of(instance):
            self._holders[slot] = instance
        return True

    def leave(self, instance: str) -> None:
        """An instance has ended."""
        self.sleep(instance)
        self._homes.pop(instance, None)

    def free(self) -> list[str]:
        """Slots that no instance uses."""
        return [slot for slot, holder in self._holders.items() if holder is None]

    def held_by(self, instance: str) -> list[str]:
        """Slots that an instance uses."""
        return [slot for slot, holder in self._holders.items() if holder == instance]

    def residents(self, slot: str) -> int:
        """How many instances use a slot in turns."""
        return sum(slot in home for home in self._homes.values())

    def wake_one(self, asleep: Sequence[str]) -> str | None:
        """Wake the first of some sleeping instances whose slots are free; None if there is none."""
        return next((instance for instance in asleep if self.wake(instance)), None)

    def displaced_by_waking(
        self, asleep: Sequence[str], idle: Collection[str], leaving: Collection[str]
    ) -> tuple[str, ...] | None:
        """Which idle instances have to sleep for one of some sleeping instances to wake: none where those that are
        leaving suffice.

        Args:
            asleep: instances that could take a task, in order of preference.
            idle: instances without work.
            leaving: instances that give their slots back already.

        Returns:
            Their names; None where all of them would not do.
        """
        for instance in asleep:
            holders = {holder for slot in self.of(instance) if (holder := self._holders[slot]) is not None}
            if not holders - set(idle) - set(leaving):
                return tuple(sorted(holders - set(leaving)))
        return None
