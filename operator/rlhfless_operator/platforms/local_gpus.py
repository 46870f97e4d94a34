"""Which instance has which of this machine's GPUs, and who makes room for whom."""

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence

from rlhfless_functions.api import Stage

_LISTING_SECONDS = 30


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs that a process started here would see, under the names that CUDA_VISIBLE_DEVICES has for them.

    Those of the variable where it is set, with no GPU where it is empty; else all that NVIDIA's driver lists.
    """
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return _chosen(chosen)
    return tuple(_ask_driver("index", environment))


def gpu_products(gpus: Collection[str], environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The products that some GPUs are, each once, such as `NVIDIA H100 80GB HBM3`.

    Args:
        gpus: as `visible_gpus` names them, by number or by UUID.
    """
    listed = _ask_driver("index,uuid,name", environment)
    rows = [[part.strip() for part in line.split(",", 2)] for line in listed]
    found = {name: None for index, uuid, name in rows if index in gpus or any(uuid.startswith(gpu) for gpu in gpus)}
    return tuple(found)


def _ask_driver(fields: str, environment: Mapping[str, str]) -> list[str]:
    """What NVIDIA's driver says of every GPU, a line each; nothing where there is none."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=_LISTING_SECONDS, check=True, env={**environment}
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def _chosen(variable: str) -> tuple[str, ...]:
    """CUDA takes names from the left, up to the first that is none."""
    names = []
    for name in variable.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        names.append(name.strip())
    return tuple(names)


class GpuAccount:
    """Which GPUs are whose. An instance has the same ones all its life, also after it has slept.

    Args:
        gpus: their names.
        per_instance: GPUs of an instance of each stage; stages that are not named need none.
    """

    def __init__(self, gpus: Sequence[str], per_instance: Mapping[Stage, int]) -> None:
        self._holders: dict[str, str | None] = dict.fromkeys(gpus)
        self._per_instance = per_instance
        self._homes: dict[str, tuple[str, ...]] = {}

    @property
    def any(self) -> bool:
        """Whether there are GPUs at all."""
        return bool(self._holders)

    def of(self, instance: str) -> tuple[str, ...]:
        """An instance's GPUs, in use or not."""
        return self._homes.get(instance, ())

    def has_room(self, stage: Stage) -> bool:
        """Whether enough GPUs are free for a fresh instance."""
        return len(self._free()) >= self._needed(stage)

    def settle(self, instance: str, stage: Stage) -> None:
        """Give a fresh instance GPUs, of which there is room: those with the fewest sleeping instances."""
        free = sorted(self._free(), key=self._residents)
        self._homes[instance] = tuple(sorted(free[: self._needed(stage)], key=list(self._holders).index))
        self._hold(instance)

    def sleep(self, instance: str) -> None:
        """An instance uses its GPUs no longer."""
        for gpu in self.of(instance):
            if self._holders[gpu] == instance:
                self._holders[gpu] = None

    def wake(self, instance: str) -> bool:
        """A sleeping instance is to use its GPUs again; False while others use any of them."""
        if any(self._holders[gpu] not in (None, instance) for gpu in self.of(instance)):
            return False
        self._hold(instance)
        return True

    def leave(self, instance: str) -> None:
        """An instance has ended."""
        self.sleep(instance)
        self._homes.pop(instance, None)

    def displaced_by_fresh(self, stage: Stage, idle: Sequence[str], leaving: Collection[str]) -> list[str] | None:
        """Which idle instances have to sleep for a fresh one to start: none where those that are leaving suffice.

        Args:
            idle: instances without work, in the order in which to take them.
            leaving: instances that give their GPUs back already.

        Returns:
            Their names; None where all of them would not do.
        """
        lacking = self._needed(stage) - len(self._free()) - sum(len(self._held_by(name)) for name in leaving)
        chosen: list[str] = []
        for name in idle:
            if lacking <= 0:
                break
            if held := self._held_by(name):
                chosen.append(name)
                lacking -= len(held)
        return chosen if lacking <= 0 else None

    def displaced_by_waking(self, instance: str, idle: Collection[str], leaving: Collection[str]) -> list[str] | None:
        """The same for an instance that sleeps: whoever uses its GPUs."""
        holders = {holder for gpu in self.of(instance) if (holder := self._holders[gpu]) is not None}
        if holders - set(idle) - set(leaving):
            return None
        return sorted(holders & set(idle))

    def _needed(self, stage: Stage) -> int:
        return self._per_instance.get(stage, 0) if self._holders else 0

    def _free(self) -> list[str]:
        return [gpu for gpu, holder in self._holders.items() if holder is None]

    def _held_by(self, instance: str) -> list[str]:
        return [gpu for gpu, holder in self._holders.items() if holder == instance]

    def _residents(self, gpu: str) -> int:
        return sum(gpu in home for home in self._homes.values())

    def _hold(self, instance: str) -> None:
        for gpu in self.of(instance):
            self._holders[gpu] = instance
