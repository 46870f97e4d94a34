"""Where a training state is: in the device's memory, or in the host's while the device is somebody else's."""

from collections.abc import Callable

import torch

from rlhfless_functions.learning.state import TrainingState

Place = Callable[[torch.Tensor], torch.Tensor]
"""A tensor as it is elsewhere; the tensor itself where it is there already."""


def move(state: TrainingState, device: torch.device) -> None:
    """Move models and optimizers to a device, bit for bit; nothing happens where they are there.

    Gradients that a step has accumulated so far move with their parameters. What `optimizer.offload` keeps in the
    host's memory stays there.

    Args:
        state: after a step; of one rank, of which each moves its own part.
        device: the rank's own, or the host.

    Raises:
        torch.OutOfMemoryError: the state is of no use any more.
    """
    if state.device != device:
        relocate(state, lambda tensor: tensor.to(device))


def relocate(state: TrainingState, place: Place) -> None:
    """Move every tensor of a state in place: references to parameters stay valid."""
    for unit, optimizer in ((state.policy_unit, state.policy_optimizer), (state.critic_unit, state.critic_optimizer)):
        if unit is not None and optimizer is not None:
            # By the module's own way, as it is the one that sharded modules (FSDP2) take note of.
            unit._apply(place)
            optimizer.follow(place)
