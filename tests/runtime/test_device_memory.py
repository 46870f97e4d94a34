"""Memory is released at once, even if something still refers to its old owner."""

import gc

import torch
from torch import nn

from rlhfless_functions.runtime.device_memory import empty, give_back


def test_a_module_that_refers_to_itself_is_freed_without_a_collection() -> None:
    module = nn.Linear(512, 512)
    module.register_buffer("table", torch.ones(512, 512))
    module.itself = [module]
    gc.disable()
    try:
        empty(module)
        give_back()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*module.parameters(), *module.buffers()))
    finally:
        gc.enable()
