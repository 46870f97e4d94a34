"""Moves a training state between the device's memory and the host's, while another process uses the device."""

from collections.abc import Callable

import torch

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
    if state.device != device:
        relocate(state, lambda tensor: tensor.to(device))


def relocate(state: TrainingState, place: Place) -> None:
    """Move every tensor of a state in place: references to parameters stay valid."""
    for unit, optimizer in ((state.policy_unit, state.policy_optimizer), (state.critic_unit, state.critic_optimizer)):
        if unit is not None and optimizer is not None:
            # Use the module's own method: sharded modules (FSDP2) update their records in it.
            unit._apply(place)
            optimizer.follow(place)
