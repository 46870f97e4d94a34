"""Checkpoints of a learner: float32 master weights, optimizer moments, and the step that they belong to."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlhfless_functions import artifacts
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.distributed.sharding import local, publish_together
from rlhfless_functions.learning.state import TrainingState
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.weights.saving import saving

_POLICY, _CRITIC, _OPTIMIZERS, _STATE = "policy.safetensors", "critic.safetensors", "optimizers.pt", "state.json"


def _part(name: str, ranks: Ranks) -> str:
    """Name of the file that a rank writes its part to."""
    stem, _, ending = name.partition(".")
    return name if ranks.size == 1 else f"{stem}-{ranks.rank + 1}-of-{ranks.size}.{ending}"


def save_checkpoint(uri: str, state: TrainingState) -> None:
    """Publish what a fresh learner needs to go on from here; nothing happens if `uri` has been published before.

    Parameters that do not learn (the backbone below an adapter) are not in it: they are the initial weights'. No state
    of a random generator is either: every step seeds its own.

    Raises:
        TaskError: `artifact_unwritable`; nothing is published.
    """
    ranks = state.ranks
    with store_errors(), publish_together(uri, ranks) as folder, saving():
        save_file(_learnt(state.policy), folder / _part(_POLICY, ranks))
        optimizers = {"policy": state.policy_optimizer.state()}
        if state.critic is not None and state.critic_optimizer is not None:
            save_file(_learnt(state.critic), folder / _part(_CRITIC, ranks))
            optimizers["critic"] = state.critic_optimizer.state()
        with (folder / _part(_OPTIMIZERS, ranks)).open("wb") as file:
            torch.save(optimizers, file)
        if ranks.rank == 0:
            (folder / _STATE).write_text(json.dumps({"version": state.version, "processes": ranks.size}))


def restore_checkpoint(uri: str, state: TrainingState) -> None:
    """Turn an initial state into the one that was saved.

    Raises:
        TaskError: `artifact_missing` if it cannot be had, `model_unloadable` if it is another job's. The state is then
            of no use any more.
    """
    with store_errors():
        folder = artifacts.local_folder(uri)
    ranks = state.ranks
    try:
        saved = json.loads((folder / _STATE).read_text())
        if saved["processes"] != ranks.size:
            raise ValueError(f"{saved['processes']} processes wrote it, and there are {ranks.size}")
        _restore_parameters(state.policy, folder / _part(_POLICY, ranks))
        optimizers = torch.load(folder / _part(_OPTIMIZERS, ranks), map_location="cpu", weights_only=True)
        state.policy_optimizer.restore(optimizers["policy"])
        if state.critic is not None and state.critic_optimizer is not None:
            _restore_parameters(state.critic, folder / _part(_CRITIC, ranks))
            state.critic_optimizer.restore(optimizers["critic"])
        state.version = saved["version"]
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise TaskError(
            "model_unloadable",
            f"checkpoint {uri} does not fit the job's model, algorithm or optimizer ({error}):"
            " undo what was changed in the job, or start it over",
        ) from error


def _learnt(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(parameter.detach()) for name, parameter in model.named_parameters() if parameter.requires_grad}


def _restore_parameters(model: nn.Module, file: Path) -> None:
    saved, own = load_file(file), _learnt(model)
    if saved.keys() != own.keys() or any(saved[name].shape != own[name].shape for name in own):
        raise ValueError("it holds other parameters")
    for name, parameter in own.items():
        parameter.copy_(saved[name])
