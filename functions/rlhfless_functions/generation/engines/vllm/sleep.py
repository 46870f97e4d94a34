"""vLLM's sleep: it releases a GPU's memory, and keeps the process, its compiled code and its CUDA graphs.

Level 1 copies the weights to the host's memory, level 2 drops them. Both drop keys and values, and with them the prefix
cache. Addresses stay reserved, and get memory again when vLLM wakes. This module does not import vLLM.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def can_sleep(engine: Any) -> bool:
    """Return whether vLLM was started in sleep mode, in which it uses an allocator of its own."""
    return bool(engine.vllm_config.model_config.enable_sleep_mode)


def wake(engine: Any) -> None:
    """Allocate all of the memory again, and copy the kept weights back.

    Raises:
        RuntimeError: if vLLM does not wake up.
    """
    if engine.is_sleeping() and not engine.wake_up():
        raise RuntimeError("vLLM is still asleep")


@contextmanager
def weights_awake(engine: Any) -> Iterator[None]:
    """Give memory for the weights during the block, in which the caller replaces all of them. At its end the rest of
    the memory follows.

    After level 2 the memory holds arbitrary data, and vLLM would sample from it without an error (vllm-project/vllm
    issue 29341). It restores only the model's buffers. New weights are prepared layer by layer in memory of their own
    and copied into the old place, where CUDA graphs expect them. There is room for both, since the KV cache gets its
    memory afterwards.

    Raises:
        RuntimeError: if vLLM does not wake up.
    """
    asleep = engine.is_sleeping()
    if asleep:
        engine.wake_up(tags=["weights"])
    yield
    if asleep and not engine.wake_up(tags=["kv_cache"]):
        raise RuntimeError("vLLM is still asleep")
