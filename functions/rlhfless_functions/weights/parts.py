"""A policy that several ranks share: built without content, and filled by each rank with its own rows of the files."""

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.distributed.sharding import own_rows
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights.policy import WEIGHTS_OF_CONFIG, build_empty, loaded_from
from rlhfless_functions.weights.source import checked_beside, model_revision, read_config, unloadable, weights_folder
from rlhfless_functions.weights.tensors import MismatchError, plan_of, safetensors_files, shapes_of


def empty_policy(model: ModelSettings, ref: WeightsReference) -> PreTrainedModel:
    """Build a policy whose float32 parameters are on `meta`: they take no memory.

    Raises:
        TaskError: `artifact_missing` or `model_unloadable`.
    """
    with checked_beside(ref.uri, revision=model_revision(model, ref.uri)) as folder:
        config = read_config(folder, ref.uri)
        with unloadable(ref.uri, WEIGHTS_OF_CONFIG):
            policy = build_empty(config, torch.float32)
            if (folder / "generation_config.json").is_file():
                policy.generation_config = GenerationConfig.from_pretrained(folder)
    drop_content(policy)
    loaded_from(policy, model, ref.uri)
    return policy.eval()


def drop_content(module: nn.Module) -> None:
    """Put a module's parameters on `meta`, and free their memory. Its buffers stay; tied parameters stay tied."""
    empty: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                bare = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                part._parameters[name] = empty.setdefault(id(parameter), bare)


def can_fill_parts(module: nn.Module, model: ModelSettings, ref: WeightsReference) -> bool:
    """Return whether the weights' files have a module's tensors under its own names, so that parts of them can be
    read."""
    try:
        with ExitStack() as stack:
            plan_of(module, shapes_of(_files(model, ref), stack)[0])
    except MismatchError:
        return False
    return True


def fill_parts(
    module: nn.Module, model: ModelSettings, ref: WeightsReference, ranks: Ranks, *, prefix: str = ""
) -> None:
    """Fill a divided module with this rank's rows of the weights' files. No other rows are read.

    Args:
        module: the policy, or a body with its architecture.
        model: the job's model.
        ref: the weights.
        ranks: ranks that share the module.
        prefix: beginning of the module's names in the files, which may have others.
    """
    with ExitStack() as stack, torch.no_grad():
        shapes, handles = shapes_of(_files(model, ref), stack)
        own = {name.removeprefix(prefix): each for name, each in shapes.items() if name.startswith(prefix)}
        for target, name in plan_of(module, own):
            handle = handles[prefix + name]
            if isinstance(target, DTensor):
                rows = own_rows(target.shape[0], ranks)
                target.to_local().copy_(handle.get_slice(prefix + name)[rows])
            else:
                target.copy_(handle.get_tensor(prefix + name))


def _files(model: ModelSettings, ref: WeightsReference) -> list[Path]:
    return safetensors_files(weights_folder(ref.uri, revision=model_revision(model, ref.uri)))
