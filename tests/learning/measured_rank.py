"""One of two learning ranks that take a step: what they exchange, and the memory that each needs.

python -m tests.learning.measured_rank FOLDER REQUEST narrow|wide holding|exchanging RANK

With `narrow`, models of any size compute in bfloat16. With `holding`, the ranks have memory for whole gradients. Files
of weights are split at 20 kB. Each writes what it found to FOLDER/found-RANK.json.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhfless_functions.api import LearnRequest, LearnResult
from rlhfless_functions.distributed import sharding
from rlhfless_functions.distributed.ranks import Seat, join
from rlhfless_functions.learning import learner as learning
from rlhfless_functions.learning import state as training_state
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.weights import saving


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: pages of files are the system's to take back."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


class Memory:
    """Bytes of this process beyond those at the start, sampled in a thread, with the time of each sample."""

    def __init__(self) -> None:
        self.samples: dict[str, list[tuple[float, int]]] = {}
        self.phase = ""
        self._start = anonymous_bytes()
        self._ended = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase = phase
        yield
        self.phase = ""

    def now(self) -> int:
        return anonymous_bytes() - self._start

    def _sample(self) -> None:
        while not self._ended.wait(0.003):
            if self.phase:
                self.samples.setdefault(self.phase, []).append((os.times().elapsed, self.now()))


def main(folder: str, request: str, format: str, gradients: str, rank: str) -> None:
    torch.set_num_threads(1)
    if format == "narrow":
        training_state.NARROWEST_ON_CPU = 1
        training_state.has_bfloat16 = lambda device: True
    if hasattr(sharding, "_SHARE_OF_GRADIENTS"):
        sharding._SHARE_OF_GRADIENTS = 1 if gradients == "holding" else 0
    exchanged: list[tuple[str, str, int]] = []
    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(dist, name, counted(name, getattr(dist, name), exchanged))
    saving.SHARD_BYTES = 20_000
    learner = learning.Learner(join(Seat(int(rank), 2, folder=folder)))
    memory, held = Memory(), {}
    initial, train = learning.initial_state, learning.train_step

    def initial_state(*given: Any) -> Any:
        dist.barrier()
        with memory.during("load"):
            state = initial(*given)
            dist.barrier()
        held["load"] = memory.now()
        exchanged.clear()
        return state

    def train_step(*given: Any) -> Any:
        with memory.during("train"):
            return train(*given)

    learning.initial_state, learning.train_step = initial_state, train_step
    result = learner.run(LearnRequest.model_validate_json(Path(request).read_text()), TaskContext(lambda event: None))
    assert isinstance(result, LearnResult)
    found = {"exchanged": exchanged, "held": held, "samples": memory.samples, "metrics": result.metrics}
    (Path(folder) / f"found-{rank}.json").write_text(json.dumps(found))


def counted(name: str, exchange: Callable[..., Any], exchanged: list[tuple[str, str, int]]) -> Callable[..., Any]:
    """Count the bytes that a rank gives to a collective."""

    def act(*given: Any, **named: Any) -> Any:
        tensor = named["input"] if "input" in named else given[1]
        exchanged.append((name, str(tensor.dtype), tensor.numel() * tensor.element_size()))
        return exchange(*given, **named)

    return act


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()
    os._exit(0)  # Threads of the process group may outlive it, and an interpreter that shuts down would die of them.
