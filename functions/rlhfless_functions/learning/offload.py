"""Moves a training state between the device's memory and the host's, while another process uses the device."""

from collections.abc import Callable

import torch
from torch import nn

from rlhfless_functions.learning.host_copy import HostCopy, padded_bytes
from rlhfless_functions.learning.state import TrainingState

Place = Callable[[torch.Tensor], torch.Tensor]
"""Returns a copy of a tensor on another device, or the tensor itself if it is there already."""


def move(state: TrainingState, device: torch.device) -> None:
    """Move models and optimizers to a device, bit for bit. Do nothing if they are there already.

    Accumulated gradients move with their parameters. What `optimizer.offload` keeps in the host's memory stays there.

    Args:
        state: state after a step; each rank moves its own part.
        device: the rank's device, or the host.

    Raises:
        torch.OutOfMemoryError: the state is unusable now.
    """
    if state.device == device:
        return
    if device.type == "cpu":
        relocate(state, _to_host(state))
    else:
        relocate(state, lambda tensor: tensor.to(device, non_blocking=True))
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def relocate(state: TrainingState, place: Place) -> None:
    """Move every tensor of a state in place: references to parameters stay valid."""
    for unit, optimizer in ((state.policy_unit, state.policy_optimizer), (state.critic_unit, state.critic_optimizer)):
        if unit is not None and optimizer is not None:
            # Use the module's own method: sharded modules (FSDP2) update their records in it.
            unit._apply(place)
            optimizer.follow(place)


def _to_host(state: TrainingState) -> Place:
    """Return what copies tensors into the state's block of host memory."""
    sizes: dict[int, int] = {}

    def measure(tensor: torch.Tensor) -> torch.Tensor:
        if _fits(tensor):
            sizes[tensor.data_ptr()] = padded_bytes(tensor)
        return tensor

    relocate(state, measure)
    size = sum(sizes.values())
    if state.host_copy is None or state.host_copy.size < size:
        # Free the old block first.
        state.host_copy = None
        state.host_copy = HostCopy(size)
    block = state.host_copy
    block.clear()
    # Tensors that share memory were measured once.
    return lambda tensor: block.place(tensor) if _fits(tensor) and block.has_room(tensor) else tensor.to("cpu")


def _fits(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may lie in a block: a whole one of a device. Sharded ones keep their own type."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "cpu" and tensor.is_contiguous()
