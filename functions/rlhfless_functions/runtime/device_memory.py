"""The device's memory that nothing refers to any more, given back to the device."""

import ctypes
import gc

import torch


def give_back() -> None:
    """Return what torch and the C library keep for later use, so that another process can have it.

    Models refer to themselves (an adapter's layers do): without a collection their memory would stay for a while.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # Without it glibc keeps what tensors on a CPU leave: all of it, from the second time on.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
