"""The device's memory that nothing refers to any more, given back to the device."""

import gc

import torch


def give_back() -> None:
    """Return what torch keeps for later use, so that another process can have it; nothing to do without a GPU but to
    collect garbage.

    Models refer to themselves (an adapter's layers do): without a collection their memory would stay for a while.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
