"""vLLM's sleep: the memory of a GPU given back while the process, its compiled code and its CUDA graphs stay.

Level 1 copies the weights to the host's memory, level 2 forgets them. Both forget keys and values, and with them the
prefix cache; addresses stay, and get memory again on waking. vLLM itself is not imported here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def can_sleep(engine: Any) -> bool:
    """Whether vLLM was started in sleep mode, in which its memory comes from an allocator of its own."""
    return bool(engine.vllm_config.model_config.enable_sleep_mode)


def sleep(engine: Any, *, keep_weights: bool) -> None:
    """Give the memory back; requests that are under way are aborted.

    Args:
        engine: vLLM's, awake.
        keep_weights: whether they are copied to the host's memory; else they have to be replaced on waking.
    """
    engine.sleep(level=1 if keep_weights else 2)


def wake(engine: Any) -> None:
    """Have all of the memory again, with the weights in it that were kept.

    Raises:
        RuntimeError: if vLLM does not wake up.
    """
    if engine.is_sleeping() and not engine.wake_up():
        raise RuntimeError("vLLM is still asleep")


@contextmanager
def weights_awake(engine: Any) -> Iterator[None]:
    """Memory for the weights within the block, in which all of them are replaced; all of the memory after it.

    After level 2 the memory holds arbitrary data, and vLLM would sample from it without an error (vllm-project/vllm
    issue 29341); it restores only the model's buffers. New weights are prepared layer by layer in memory of their own
    and copied into the old place, where CUDA graphs expect them. This memory is available before the KV cache takes the
    rest.

    Raises:
        RuntimeError: if vLLM does not wake up.
    """
    asleep = engine.is_sleeping()
    if asleep:
        engine.wake_up(tags=["weights"])
    yield
    if asleep and not engine.wake_up(tags=["kv_cache"]):
        raise RuntimeError("vLLM is still asleep")
