"""Publishing models from ranks that hold a part of each tensor: every rank writes a file, and none holds everything."""

from collections.abc import Mapping

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from rlhfless_functions.artifacts import Publication
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.distributed.sharding import owned, publish_together, whole
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.weights.adapters import write_adapter
from rlhfless_functions.weights.critic import CriticModel, write_critic_settings
from rlhfless_functions.weights.saving import (
    shard_names,
    sizes,
    split,
    write_index,
    write_settings,
    write_shards,
    write_tokenizer,
)


def check_sharded_publishing(policy: nn.Module) -> None:
    """Check that the architecture's tensors are published under the names that they have in memory.

    Raises:
        TaskError: `model_unloadable` if its tensors are fused or renamed when it is loaded.
    """
    if isinstance(policy, PeftModel):
        return
    assert isinstance(policy, PreTrainedModel)
    names = {name: tensor.to("meta") for name, tensor in policy.state_dict().items()}
    if revert_weight_conversion(policy, dict(names)).keys() != names.keys():
        raise TaskError(
            "model_unloadable",
            f"{type(policy).__name__} keeps its tensors in another form in memory than in files, which several learning"
            " processes cannot publish: set learning.processes to 1",
        )


def publish_weights_together(
    uri: str,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    ranks: Ranks,
    *,
    since: str | None = None,
) -> None:
    """Do the same as `publish_weights`, by all ranks.

    Raises:
        TaskError: `artifact_unwritable`; nothing is published.
    """
    with store_errors(), publish_together(uri, ranks, since=since) as publication:
        _write(policy, {}, dtype, publication, ranks)
        if ranks.rank == 0:
            write_settings(policy, publication.folder, dtype)
            write_tokenizer(tokenizer, publication.folder)


def publish_critic_together(uri: str, critic: CriticModel, dtype: torch.dtype, ranks: Ranks) -> None:
    """Do the same as `publish_critic`, by all ranks.

    Raises:
        TaskError: `artifact_unwritable`; nothing is published.
    """
    with store_errors(), publish_together(uri, ranks) as publication:
        _write(critic, {"score.weight": torch.float32}, dtype, publication, ranks)
        if ranks.rank == 0:
            write_critic_settings(critic, publication.folder, dtype)


def publish_adapter_together(uri: str, policy: PeftModel, ranks: Ranks) -> None:
    """Do the same as `publish_adapter`, by all ranks. An adapter is small enough for each of them to hold it.

    Raises:
        TaskError: `artifact_unwritable`; nothing is published.
    """
    learnt = ((name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad)
    state = {name: whole(parameter.detach()).cpu() for name, parameter in learnt}
    with store_errors(), publish_together(uri, ranks) as publication:
        if ranks.rank == 0:
            write_adapter(publication.folder, policy, state)


def _write(
    module: nn.Module,
    dtypes: Mapping[str, torch.dtype],
    dtype: torch.dtype,
    publication: Publication,
    ranks: Ranks,
) -> None:
    names: dict[int, str] = {}
    tensors = module.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)  # of tied tensors one is written
    distinct = {name: tensors[name] for name in names.values()}
    mine = {
        name: tensor.to(dtypes.get(name, dtype) if tensor.is_floating_point() else tensor.dtype).cpu().contiguous()
        for name, tensor in owned(distinct, ranks)
    }
    shards = split(mine)
    of_ranks = ranks.all([sizes(shard) for shard in shards])
    files = shard_names(sum(len(shards) for shards in of_ranks))
    before = sum(len(shards) for shards in of_ranks[: ranks.rank])
    own = files[before : before + len(shards)]
    write_shards(dict(zip(own, shards, strict=True)), publication.folder, publication.finish)
    if ranks.rank == 0:
        every = [shard for shards in of_ranks for shard in shards]
        write_index(dict(zip(files, every, strict=True)), publication.folder)
