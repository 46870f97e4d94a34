"""A model over several ranks: each holds a part of every tensor, and gathers a layer to compute with it (FSDP2)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhfless_functions import artifacts
from rlhfless_functions.distributed.ranks import Ranks

_T = TypeVar("_T")


class Unit(nn.Module):
    """A model, and the way to compute with its whole tensors: the root of its sharding, if it is sharded.

    Args:
        model: a policy or a critic.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], _T]) -> _T:
        """Return the result of `compute` with the model: tensors. Inside, the weights outside its layers are whole."""
        return compute(self.model)

    def forget_whole(self) -> None:
        """Keep this rank's part of the weights alone, as a backward pass does at its end. After forward passes alone,
        the weights outside the layers would stay whole, and miss the next update."""
        if isinstance(self, FSDPModule):
            self.reshard()


def unit_of(model: nn.Module, ranks: Ranks) -> Unit:
    """Use a model as it is, or leave each rank its part of it, on its device. Every rank must have the same model."""
    unit = Unit(model)
    if ranks.size > 1:
        assert ranks.mesh is not None
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=ranks.mesh)
        fully_shard(unit, mesh=ranks.mesh)
    return unit


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, gathered from the ranks. All ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def owned(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that this rank owns, whole. Every rank must go through all of them.

    No rank holds more than its share and one tensor at a time.

    Args:
        tensors: by name, the same on every rank.
        ranks: ranks that share them.
    """
    mine = set(ranks.deal([tensor.numel() * tensor.element_size() for tensor in tensors.values()]))
    for number, (name, tensor) in enumerate(tensors.items()):
        gathered = whole(tensor.detach())
        if number in mine:
            yield name, gathered


@contextmanager
def publish_together(uri: str, ranks: Ranks, *, since: str | None = None) -> Iterator[Path]:
    """Do the same as `artifacts.publish` for all ranks: each writes its files, and the folder is published when all
    have.

    The ranks of several instances write to the store's file system. If it has none, each instance uploads the files of
    its ranks, and their deltas.

    Raises:
        ArtifactUnwritableError: `uri` can't be written; nothing is published.
    """
    if ranks.instances > 1 and artifacts.local_path(uri) is None:
        with _uploaded_together(uri, ranks, since) as folder:
            yield folder
    elif ranks.rank == 0:
        with artifacts.publish(uri, since=since) as folder:
            ranks.all(str(folder))
            yield folder
            ranks.all("written")
    else:
        yield Path(ranks.all("")[0])
        ranks.all("written")


@contextmanager
def _uploaded_together(uri: str, ranks: Ranks, since: str | None) -> Iterator[Path]:
    part = f"{ranks.instance + 1}-of-{ranks.instances}"
    with ExitStack() as cleaning:
        own = None if ranks.place else cleaning.enter_context(artifacts.uploading(uri, since=since, part=part))
        folder = Path(ranks.all(str(own.folder) if own is not None else "")[ranks.rank - ranks.place])
        yield folder
        ranks.all("written")
        sent = ranks.all(own.send() if own is not None else artifacts.Manifest({}))
        published = artifacts.combine(sent)
        completed = ranks.all(ranks.rank == 0 and artifacts.complete(uri, published))[0]
        if own is not None and completed:
            own.keep(published)
