"""This machine's GPUs as slots, and the placement of new processes on them."""

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence

from rlhfless_functions.api import Stage
from rlhfless_operator.platforms.slots import SlotAccount

_LISTING_SECONDS = 30


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that a new process would see, by their names in CUDA_VISIBLE_DEVICES.

    If the variable is set, these are its GPUs, or none if it is empty. Otherwise they are all that NVIDIA's driver
    lists.
    """
    if (chosen := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return _chosen(chosen)
    return tuple(_ask_driver("index", environment))


def gpu_products(gpus: Collection[str], environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the products of GPUs, each once, such as `NVIDIA H100 80GB HBM3`.

    Args:
        gpus: names from `visible_gpus`, by number or by UUID.
    """
    listed = _ask_driver("index,uuid,name", environment)
    rows = [[part.strip() for part in line.split(",", 2)] for line in listed]
    found = {name: None for index, uuid, name in rows if index in gpus or any(uuid.startswith(gpu) for gpu in gpus)}
    return tuple(found)


def _ask_driver(fields: str, environment: Mapping[str, str]) -> list[str]:
    """Return the fields of every GPU from NVIDIA's driver, one line each; empty without a driver."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=_LISTING_SECONDS, check=True, env={**environment}
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]


def _chosen(variable: str) -> tuple[str, ...]:
    """Return the GPUs named in a variable as CUDA reads them: from the left, up to the first invalid name."""
    names = []
    for name in variable.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        names.append(name.strip())
    return tuple(names)


class GpuAccount(SlotAccount):
    """The GPUs of this machine, each a slot. A new process takes its GPUs immediately.

    Args:
        gpus: their names.
        per_instance: number of GPUs of an instance of each stage; missing stages need none.
    """

    def __init__(self, gpus: Sequence[str], per_instance: Mapping[Stage, int]) -> None:
        super().__init__(gpus)
        self._per_instance = per_instance

    def has_room(self, stage: Stage) -> bool:
        """Return whether enough GPUs are free for a new instance."""
        return len(self.free()) >= self._needed(stage)

    def settle(self, instance: str, home: Collection[str]) -> None:
        """Give free GPUs to a new instance."""
        self.place(instance, home)
        self.wake(instance)

    def home_of_fresh(self, stage: Stage, idle: Sequence[str] = (), leaving: Collection[str] = ()) -> list[str] | None:
        """Return the GPUs for a new instance, now or later.

        Free GPUs come first, those with the fewest sleeping instances ahead; then GPUs that are being released; then
        those of idle instances.

        Args:
            idle: idle instances, in the order in which to take their GPUs.
            leaving: instances that are releasing their GPUs.

        Returns:
            Names of GPUs; None if there are too few.
        """
        yielding = [*leaving, *idle]
        order = {name: number for number, name in enumerate(yielding)}

        def rank(gpu: str) -> tuple[int, int]:
            holder = self.holders[gpu]
            if holder is None:
                return -1, self.residents(gpu)
            return order.get(holder, len(yielding)), 0

        chosen = sorted(self.holders, key=rank)[: self._needed(stage)]
        return chosen if len(chosen) == self._needed(stage) else None

    def _needed(self, stage: Stage) -> int:
        return self._per_instance.get(stage, 0) if self.any else 0
