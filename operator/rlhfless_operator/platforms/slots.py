"""Slots: GPUs that instances use in turns. This module keeps the slots of each instance, and the holder of each.

On one machine a slot is a GPU, on a cluster a ResourceClaim. On both `planner/pools/turns.py` decides whose turn it is.
"""

from collections.abc import Collection, Mapping, Sequence


class SlotAccount:
    """The account of slots. An instance keeps the same slots all its life, also after it has slept.

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
        """The instance that is awake on each slot; None if the slot is free."""
        return self._holders

    @property
    def any(self) -> bool:
        """Whether there are slots at all."""
        return bool(self._holders)

    def of(self, instance: str) -> tuple[str, ...]:
        """Return an instance's slots, in use or not."""
        return self._homes.get(instance, ())

    def place(self, instance: str, slots: Collection[str]) -> None:
        """Give slots to a new instance, which sleeps. Adds unknown slots."""
        for slot in slots:
            self._holders.setdefault(slot, None)
        self._homes[instance] = tuple(slot for slot in self._holders if slot in slots)

    def sleep(self, instance: str) -> None:
        """Release the slots of an instance."""
        for slot in self.of(instance):
            if self._holders[slot] == instance:
                self._holders[slot] = None

    def may_wake(self, instance: str) -> bool:
        """Return whether no other instance uses an instance's slots."""
        return all(self._holders[slot] in (None, instance) for slot in self.of(instance))

    def wake(self, instance: str) -> bool:
        """Let a sleeping instance use its slots again. Returns False while others use any of them."""
        if not self.may_wake(instance):
            return False
        for slot in self.of(instance):
            self._holders[slot] = instance
        return True

    def leave(self, instance: str) -> None:
        """Remove an instance that has ended."""
        self.sleep(instance)
        self._homes.pop(instance, None)

    def free(self) -> list[str]:
        """Return the slots that no instance uses."""
        return [slot for slot, holder in self._holders.items() if holder is None]

    def residents(self, slot: str) -> int:
        """Return the number of instances that use a slot in turns."""
        return sum(slot in home for home in self._homes.values())
