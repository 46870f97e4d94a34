"""vLLM's sleep: it releases a GPU's memory, and keeps the process, its compiled code and its CUDA graphs.

Level 1 copies the weights to the host's memory, level 2 drops them. Both drop keys and values, and with them the prefix
cache. Addresses stay reserved, and get memory again when vLLM wakes. This module does not import vLLM.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

logger = logging.getLogger(__name__)

_GREW = "Memory usage increased"
"""Beginning of vLLM's complaint that the GPU has less free memory after its sleep than before."""


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


def sleep_beside_others() -> None:
    """Let vLLM sleep while other processes take memory of its GPU. Call this once in each of vLLM's processes.

    vLLM compares the GPU's free memory before and after, once it has released its own. Memory that another process took
    in between is no fault of its sleep. What vLLM leaves in use is logged.
    """
    from vllm.v1.worker.gpu_worker import Worker

    release = Worker.sleep

    @wraps(release)
    def sleep(worker: Any, level: int = 1) -> None:
        try:
            release(worker, level)
        except AssertionError as error:
            if not str(error).startswith(_GREW):
                raise
            logger.warning("While vLLM released its memory, another process took more of the same GPU")
        free, total = torch.accelerator.get_memory_info()
        kept = "CUDA contexts, CUDA graphs and what other processes hold"
        if worker.parallel_config.world_size > 1 and not worker.model_config.enable_nccl_comm_suspend:
            kept += ", and NCCL's buffers, which generation.vllm.extraArgs: enable_nccl_comm_suspend releases"
        logger.info("vLLM sleeps; %.2f GiB of its GPU are still in use: %s", (total - free) / 2**30, kept)

    Worker.sleep = sleep
