"""Checkpoints of a learner: float32 master weights, optimizer moments, and the step that they belong to.

Each rank writes the rows that it holds. Any number of ranks can continue from them: each reads its own rows, bit for
bit. `torch.distributed.checkpoint` would do the same, but it pickles its metadata, and unpickling can run code from the
store.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from rlhfless_functions import artifacts
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.distributed.sharding import local, own_rows, publish_together
from rlhfless_functions.learning.state import TrainingState
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.weights.saving import saving

_POLICY, _CRITIC, _OPTIMIZERS, _STATE = "policy.safetensors", "critic.safetensors", "optimizers.pt", "state.json"


class Rows(Protocol):
    """A tensor, or a view of one in a file, that can be sliced by rows."""

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Return the rows of the slice."""


def _part(name: str, rank: int, size: int) -> str:
    """Return the name of the file for one rank's part, given the number of ranks."""
    stem, _, ending = name.partition(".")
    return name if size == 1 else f"{stem}-{rank + 1}-of-{size}.{ending}"


def save_checkpoint(uri: str, state: TrainingState) -> None:
    """Publish what a new learner needs to continue from here. Does nothing if `uri` has been published before.

    It has no parameters that do not learn (the backbone below an adapter), because the initial weights have them. It
    has no state of a random generator either, because every step seeds its own.

    Raises:
        TaskError: `artifact_unwritable`; nothing is published.
    """
    ranks = state.ranks
    with store_errors(), publish_together(uri, ranks) as publication, saving():

        def place(name: str) -> Path:
            return publication.folder / _part(name, ranks.rank, ranks.size)

        save_file(_learnt(state.policy), place(_POLICY))
        publication.finish(place(_POLICY).name)
        optimizers = {"policy": state.policy_optimizer.state()}
        if state.critic is not None and state.critic_optimizer is not None:
            save_file(_learnt(state.critic), place(_CRITIC))
            publication.finish(place(_CRITIC).name)
            optimizers["critic"] = state.critic_optimizer.state()
        with place(_OPTIMIZERS).open("wb") as file:
            torch.save(optimizers, file)
        if ranks.rank == 0:
            (publication.folder / _STATE).write_text(json.dumps({"version": state.version, "processes": ranks.size}))


def restore_checkpoint(uri: str, state: TrainingState) -> None:
    """Turn an initial state into the saved one.

    Raises:
        TaskError: `checkpoint_damaged` if it is not whole any more, `artifact_missing` if the store does not answer,
            `model_unloadable` if it belongs to another job. The state is then unusable.
    """
    ranks = state.ranks
    with _opened(uri, "job's model, algorithm or optimizer", "undo the changes of the job, or start it over") as folder:
        saved = json.loads((folder / _STATE).read_text())

        def parts(name: str) -> list[Path]:
            return [folder / _part(name, rank, saved["processes"]) for rank in range(saved["processes"])]

        _restore_parameters(state.policy, parts(_POLICY), ranks)
        # Only this rank's rows of each file are read.
        written = [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in parts(_OPTIMIZERS)]
        state.policy_optimizer.restore(_own_moments([part["policy"] for part in written], ranks))
        if state.critic is not None and state.critic_optimizer is not None:
            _restore_parameters(state.critic, parts(_CRITIC), ranks)
            state.critic_optimizer.restore(_own_moments([part["critic"] for part in written], ranks))
        state.version = saved["version"]


def restore_policy(uri: str, policy: nn.Module) -> None:
    """Load the parameters of a checkpoint into a policy. Any number of ranks may have written the checkpoint.

    Args:
        uri: the checkpoint.
        policy: the job's policy, as it was before the first step.

    Raises:
        TaskError: `checkpoint_damaged` if it is not whole any more, `artifact_missing` if the store does not answer,
            `model_unloadable` if it belongs to another model. The policy is then unusable.
    """
    remedy = "name the checkpoint of a run with the same spec.model"
    with _opened(uri, "model of its job", remedy) as folder, torch.no_grad():
        written = json.loads((folder / _STATE).read_text())["processes"]
        parts = [folder / _part(_POLICY, rank, written) for rank in range(written)]
        _restore_parameters(policy, parts, Ranks())


@contextmanager
def _opened(uri: str, owner: str, remedy: str) -> Iterator[Path]:
    """Give a checkpoint's folder, and turn the errors of content that does not fit into the task's."""
    try:
        with store_errors():
            folder = artifacts.local_folder(uri)
    except TaskError as error:
        if error.retryable or error.reason == "artifact_unwritable":
            raise
        raise TaskError("checkpoint_damaged", str(error)) from error
    try:
        yield folder
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise TaskError("model_unloadable", f"checkpoint {uri} does not fit the {owner} ({error}); {remedy}") from error


def _learnt(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(parameter.detach()) for name, parameter in model.named_parameters() if parameter.requires_grad}


def _restore_parameters(model: nn.Module, files: Sequence[Path], ranks: Ranks) -> None:
    own = _learnt(model)
    with ExitStack() as opened:
        parts = [opened.enter_context(safe_open(file, "pt")) for file in files]
        if any(set(part.keys()) != own.keys() for part in parts):
            raise ValueError("it holds other parameters")
        for name, parameter in own.items():
            views = [part.get_slice(name) for part in parts]
            shapes = [tuple(view.get_shape()) for view in views]
            rows = [shape[0] for shape in shapes if shape]
            found = _own_rows(views, rows, ranks) if rows else parts[0].get_tensor(name)
            if found.shape != parameter.shape:
                raise ValueError("it holds other parameters")
            parameter.copy_(found)


def _own_moments(parts: Sequence[list[dict[str, Any]]], ranks: Ranks) -> list[dict[str, Any]]:
    """Return the state dictionaries of this rank's optimizers, made from those of the ranks that wrote the
    checkpoint."""

    def own(moments: Sequence[Any]) -> Any:
        first = moments[0]
        if not torch.is_tensor(first) or first.ndim == 0:
            return first
        return _own_rows(moments, [len(each) for each in moments], ranks)

    return [
        {
            **each,
            "state": {
                number: {name: own([other[place]["state"][number][name] for other in parts]) for name in moments}
                for number, moments in each["state"].items()
            },
        }
        for place, each in enumerate(parts[0])
    ]


def _own_rows(parts: Sequence[Rows], lengths: Sequence[int], ranks: Ranks) -> torch.Tensor:
    """Return this rank's rows of a tensor, in memory of their own.

    Args:
        parts: the tensor's rows, in their order.
        lengths: how many rows each part has.
    """
    mine = own_rows(sum(lengths), ranks)
    begin, end = mine.start, mine.stop
    found, at = [], 0
    for part, length in zip(parts, lengths, strict=True):
        first, last = max(begin, at) - at, min(end, at + length) - at
        if first < last:
            found.append(part[first:last])
        at += length
    return torch.cat(found) if found else parts[0][0:0].clone()
