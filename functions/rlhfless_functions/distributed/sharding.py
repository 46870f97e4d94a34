"""A model over several ranks: each holds a part of every tensor, and gathers a layer to compute with it (FSDP2)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import Publication
from rlhfless_functions.distributed.ranks import Ranks

_T = TypeVar("_T")
_SHARE_OF_GRADIENTS = 1 / 4
"""Share of a rank's memory that whole float32 gradients may take between two passes."""


class Unit(nn.Module):
    """A model, and the way to compute with its whole tensors: the root of its sharding, if it is sharded.

    Args:
        model: a policy or a critic.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.can_wait = False
        """Whether the ranks have memory for the gradients of whole tensors."""
        self.gathered: torch.dtype | None = None
        """Format of gathered weights, if it is not that of the parts."""

    def forward(self, compute: Callable[[nn.Module], _T]) -> _T:
        """Return the result of `compute` with the model: tensors. Inside, the weights outside its layers are whole."""
        return compute(self.model)

    def forget_whole(self) -> None:
        """Keep this rank's part of the weights alone, as a backward pass does at its end. After forward passes alone,
        the weights outside the layers would stay whole, and miss the next update."""
        if isinstance(self, FSDPModule):
            self.reshard()

    def wait_with_gradients(self, more: bool) -> None:
        """Tell the ranks whether more passes follow whose gradients they add up before they exchange any.

        They then hold the gradients of whole tensors in float32, and save an exchange a pass. A model that is too large
        for that exchanges them after each pass.
        """
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(not (more and self.can_wait))


def unit_of(
    model: nn.Module,
    ranks: Ranks,
    arithmetic: torch.dtype = torch.float32,
    exact: Sequence[nn.Module] = (),
) -> Unit:
    """Use a model as it is, or leave each rank its part of it, on its device. Every rank must have the same model.

    Args:
        model: a policy or a critic. Its parts are as its tensors: also without content, on `meta`.
        ranks: ranks that share it.
        arithmetic: format in which several ranks gather layers and compute with them, if the weights are float32. The
            parts and the gradients' sums stay in float32. One rank casts its weights itself.
        exact: modules that compute in float32 nevertheless.
    """
    unit = Unit(model)
    if ranks.size > 1:
        assert ranks.mesh is not None
        wide = next(model.parameters()).dtype == torch.float32
        narrow = arithmetic if wide and arithmetic != torch.float32 else None
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=None if narrow is None else torch.float32)
        for module in exact if narrow is not None else ():
            fully_shard(module, mesh=ranks.mesh)
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=ranks.mesh, mp_policy=policy)
        fully_shard(unit, mesh=ranks.mesh, mp_policy=policy)
        unit.gathered = narrow
        unit.can_wait = all(ranks.all(_has_memory_for_gradients(model, ranks)))
    return unit


def _has_memory_for_gradients(model: nn.Module, ranks: Ranks) -> bool:
    """Return whether whole float32 gradients leave enough of the memory of this rank's GPU, or of its share of the
    host's."""
    if ranks.device.type == "cuda":
        memory = int(torch.cuda.get_device_properties(ranks.device).total_memory)
    else:
        memory = int(psutil.virtual_memory().total) // (ranks.of_instance or ranks.size)
    learnt = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return 4 * learnt <= _SHARE_OF_GRADIENTS * memory


def hold_parts(unit: Unit, device: torch.device) -> None:
    """Give the parts of a model that was divided on `meta` memory on a device. Their content is yet to be loaded."""
    unit._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each.to(device))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, gathered from the ranks. All ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(rows: int, ranks: Ranks) -> slice:
    """Return which rows of a tensor are this rank's."""
    # FSDP2 divides rows as `torch.chunk` does.
    share = math.ceil(rows / ranks.size)
    return slice(min(rows, ranks.rank * share), min(rows, (ranks.rank + 1) * share))


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
def publish_together(uri: str, ranks: Ranks, *, since: str | None = None) -> Iterator[Publication]:
    """Do the same as `artifacts.publishing` for all ranks: each writes its files, and the folder is published when all
    have.

    The ranks of several instances write to the store's file system. If it has none, each instance uploads the files of
    its ranks, and their deltas.

    Raises:
        ArtifactUnwritableError: `uri` can't be written; nothing is published.
    """
    if ranks.instances > 1 and artifacts.local_path(uri) is None:
        with _uploaded_together(uri, ranks, since) as publication:
            yield publication
    elif ranks.rank == 0:
        with artifacts.publishing(uri, since=since) as publication:
            ranks.all(str(publication.folder))
            yield publication
            ranks.all("written")
    else:
        folder = Path(ranks.all("")[0])
        flushed = artifacts.local_path(uri) is not None
        yield Publication(folder, lambda name: artifacts.flush(folder / name) if flushed else None)
        ranks.all("written")


@contextmanager
def _uploaded_together(uri: str, ranks: Ranks, since: str | None) -> Iterator[Publication]:
    part = f"{ranks.instance + 1}-of-{ranks.instances}"
    with ExitStack() as cleaning:
        own = None if ranks.place else cleaning.enter_context(artifacts.uploading(uri, since=since, part=part))
        folder = Path(ranks.all(str(own.folder) if own is not None else "")[ranks.rank - ranks.place])
        yield Publication(folder, own.begin if own is not None else lambda name: None)
        ranks.all("written")
        sent = ranks.all(own.send() if own is not None else artifacts.Manifest({}))
        published = artifacts.combine(sent)
        completed = ranks.all(ranks.rank == 0 and artifacts.complete(uri, published))[0]
        if own is not None and completed:
            own.keep(published)
