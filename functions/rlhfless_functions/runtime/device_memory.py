"""The device's memory that is not needed any more, given back to the device."""

import ctypes
import gc

import torch
from torch import nn

_WORTH_A_COLLECTION = 64 * 2**20
"""Bytes on a GPU that somebody still holds: kernels' own workspaces take less."""


def empty(module: nn.Module) -> None:
    """Free the memory of a module's tensors at once, whoever still refers to the module. It is of no use any more.

    Models refer to themselves (an adapter's layers do), so that without this their memory would wait for a collection,
    which takes a fifth of a second where transformers has been imported.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def give_back() -> None:
    """Return what torch and the C library keep for later use, so that another process can have it."""
    if torch.cuda.is_available():
        if torch.cuda.memory_allocated() > _WORTH_A_COLLECTION:
            gc.collect()
        torch.cuda.empty_cache()
    # Without it glibc keeps what tensors on a CPU leave: all of it, from the second time on.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
