"""The critic: the body of the policy's architecture with a scalar head.

It is published in the layout of transformers' sequence classification with one label: the body under the architecture's
own prefix, and `score.weight`.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights.building import building, building_uninitialized
from rlhfless_functions.weights.policy import load_module, torch_dtype
from rlhfless_functions.weights.saving import converted, host_copy, write_tensors
from rlhfless_functions.weights.source import model_revision, read_config, unloadable, weights_folder
from rlhfless_functions.weights.support import kernels
from rlhfless_functions.weights.tensors import load_into, safetensors_files


class CriticModel(nn.Module):
    """A transformer's body and a bias-free linear head in float32, zero at first: all values are then zero. The value
    at token t is that of the text up to and including it."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.config = copy.deepcopy(body.config)
        self.config.num_labels = 1
        self.config.architectures = [type(body).__name__.removesuffix("Model") + "ForSequenceClassification"]
        self._prefix = body.base_model_prefix
        self.add_module(self._prefix, body)
        self.score = nn.Linear(self.config.get_text_config().hidden_size, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(self.score.weight)

    @property
    def body(self) -> PreTrainedModel:
        """The transformer below the head."""
        return cast(PreTrainedModel, self.get_submodule(self._prefix))


def load_critic(model: ModelSettings, ref: WeightsReference, dtype: torch.dtype | None = None) -> CriticModel:
    """Load a published critic, or make a new one from a policy's weights: a copy of its body with a zero head.

    The folder tells which of the two it has. The critic is on the CPU, in evaluation mode.

    Args:
        model: the job's model.
        ref: the critic, or the policy.
        dtype: number format of the body; by default `model.dtype`.

    Raises:
        TaskError: `artifact_missing` or `model_unloadable`.
    """
    folder = weights_folder(ref.uri, revision=model_revision(model, ref.uri))
    config = read_config(folder, ref.uri)
    dtype = dtype or torch_dtype(model)
    if not (config.architectures or [""])[0].endswith("ForSequenceClassification"):
        policy = load_module(folder, ref.uri, config, dtype)
        with building():
            return CriticModel(cast(PreTrainedModel, policy.base_model)).eval()
    with unloadable(ref.uri, "give a critic that this job published, or the policy's weights"):
        with building_uninitialized():
            critic = CriticModel(AutoModel.from_config(config, dtype=dtype, **kernels(config)))
        load_into(critic, safetensors_files(folder))
    return critic.eval()


def swap_critic(critic: CriticModel, ref: WeightsReference) -> None:
    """Load another published critic in place, all or nothing.

    Raises:
        TaskError: it can't be had or does not fit; the critic is unchanged.
    """
    folder = weights_folder(ref.uri)
    with unloadable(ref.uri, "give a critic that this job published"):
        load_into(critic, safetensors_files(folder))


def critic_state(critic: CriticModel, dtype: torch.dtype, *, copied: bool = False) -> dict[str, Tensor]:
    """Return a critic's state as it is published: the body in `dtype`, and the head in float32. See `converted`."""
    head = critic.score.weight.detach()
    return {**converted(critic, dtype, copied=copied), "score.weight": host_copy(head, head.dtype) if copied else head}


def publish_critic(
    uri: str, critic: CriticModel, dtype: torch.dtype | None = None, *, state: Mapping[str, Tensor] | None = None
) -> None:
    """Publish a critic; do nothing if `uri` has been published before.

    Args:
        uri: the folder.
        critic: the critic.
        dtype: number format of the published body, by default its own. The head stays float32.
        state: an earlier `critic_state` to publish; by default the present one.

    Raises:
        TaskError: `artifact_unwritable`; nothing is published.
    """
    with store_errors(), artifacts.publishing(uri) as publication:
        dtype, folder = dtype or critic.body.dtype, publication.folder
        tensors = critic_state(critic, dtype) if state is None else state
        write_tensors(tensors, folder, finish=publication.finish)
        write_critic_settings(critic, folder, dtype)


def write_critic_settings(critic: CriticModel, folder: Path, dtype: torch.dtype) -> None:
    """Write a critic's configuration.

    Raises:
        OSError: if the disk is full.
    """
    config = copy.deepcopy(critic.config)
    config.dtype = dtype
    config.save_pretrained(folder)
