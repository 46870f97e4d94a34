"""The policy's weights: load them, swap them in place, publish them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights.adapters import attach_adapter, load_adapter_into
from rlhfless_functions.weights.building import building, building_uninitialized
from rlhfless_functions.weights.fingerprints import fingerprint
from rlhfless_functions.weights.row_bits import fix_single_outputs
from rlhfless_functions.weights.saving import write_model, write_tokenizer
from rlhfless_functions.weights.source import checked_beside, model_revision, read_config, unloadable, weights_folder
from rlhfless_functions.weights.support import check_weights_format, kernels
from rlhfless_functions.weights.tensors import (
    MismatchError,
    load_into,
    map_into,
    pairs_in_memory,
    pairs_of_files,
    safetensors_files,
)

WEIGHTS_OF_CONFIG = "give a folder of safetensors weights that belong to its config.json"
"""Remedy for a model that can't be loaded."""
_OWN_WEIGHTS = "give weights of the job's own model"

_origins: WeakKeyDictionary[nn.Module, tuple[ModelSettings, str]] = WeakKeyDictionary()
"""The job's model for which a policy was loaded, and the source of its first weights, or of its backbone's."""


def torch_dtype(model: ModelSettings) -> torch.dtype:
    """Return the number format in which the model generates and prepares."""
    return torch.float32 if model.dtype == "float32" else torch.bfloat16


def load_policy(
    model: ModelSettings, ref: WeightsReference, dtype: torch.dtype | None = None
) -> PreTrainedModel | PeftModel:
    """Load a policy on the CPU, in evaluation mode.

    If the job trains an adapter, the model has one. At version 0 it does nothing. The backbone alone, which is the
    reference, is the same model under `disable_adapter()`. It is memory-mapped: processes of one machine that hold one
    backbone, of one job or of several, have it in memory once.

    Args:
        model: the job's model.
        ref: the weights.
        dtype: number format; by default `model.dtype`. Files in another float format are converted.

    Raises:
        TaskError: `artifact_missing`, `model_unloadable`, or `bad_request` for an adapter without `model.lora`.
    """
    if ref.adapter is not None and model.lora is None:
        raise TaskError("bad_request", f"{ref.adapter} is given as an adapter, but model.lora is not set: set it")
    with checked_beside(ref.uri, revision=model_revision(model, ref.uri)) as folder:
        config = read_config(folder, ref.uri)
        backbone = load_module(folder, ref.uri, config, dtype or torch_dtype(model), mapped=model.lora is not None)
    if model.lora is None:
        policy: PreTrainedModel | PeftModel = backbone
    else:
        policy = attach_adapter(backbone, model.lora, fingerprint(folder))
        if ref.adapter is not None:
            load_adapter_into(policy, ref.adapter)
    loaded_from(policy, model, ref.uri)
    return policy.eval()


def swap_policy(policy: PreTrainedModel | PeftModel, ref: WeightsReference, *, remedy: str = _OWN_WEIGHTS) -> None:
    """Load other weights into a policy, in place, all or nothing.

    Everything is checked (checksums, names, shapes) before the first tensor is touched. With an adapter only the
    adapter is swapped.

    Args:
        policy: the job's model.
        ref: the weights.
        remedy: remedy if they do not fit, for the message.

    Raises:
        TaskError: the weights can't be had or do not fit; the policy is unchanged.
    """
    _, uri = _origins.get(policy, (None, ref.uri))
    if isinstance(policy, PeftModel):
        if uri != ref.uri:
            raise TaskError(
                "model_unloadable", f"the backbone here is {uri}, not {ref.uri}: load the policy anew", retryable=True
            )
        load_adapter_into(policy, ref.adapter)
        return
    with torch.no_grad():
        for target, tensor in policy_pairs(policy, ref, remedy=remedy):
            target.copy_(tensor)


def policy_pairs(
    policy: PreTrainedModel, ref: WeightsReference, *, remedy: str = _OWN_WEIGHTS
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each distinct tensor of a policy with its source in other weights, which may be in another float format.

    Raises:
        TaskError: the weights can't be had or do not fit; raised before the first pair.
    """
    model, _ = _origins.get(policy, (None, None))
    folder = weights_folder(ref.uri, revision=model_revision(model, ref.uri) if model else None)
    with unloadable(ref.uri, remedy):
        try:
            yield from pairs_of_files(policy, safetensors_files(folder))
        except MismatchError:
            other = _load_converted(folder, ref.uri, policy.config, policy.dtype)
            yield from pairs_in_memory(policy, other.state_dict())


def publish_weights(
    uri: str,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    since: str | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
    shard_bytes: int | None = None,
) -> None:
    """Publish a policy as a complete Hugging Face folder; do nothing if `uri` has been published before.

    Args:
        uri: the folder.
        policy: the model. If it has an adapter, call `publish_adapter` instead, or merge it first.
        tokenizer: saved with it, because every version can be loaded alone.
        dtype: number format of the published weights; by default the model's own.
        texts: contents of further files, by name.
        since: the version before. The changes since then are published too, if that helps. See `artifacts.publish`.
        state: the tensors to publish, in `dtype`; by default the present ones.
        shard_bytes: bytes above which a file is split; by default those of a version.

    Raises:
        TaskError: `artifact_unwritable`; nothing is published.
    """
    with store_errors(), artifacts.publishing(uri, since=since) as publication:
        folder = publication.folder
        write_model(policy, folder, dtype, state=state, shard_bytes=shard_bytes, finish=publication.finish)
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder)
        for name, text in (texts or {}).items():
            (folder / name).write_text(text, encoding="utf-8")


def load_module(
    folder: Path, uri: str, config: PreTrainedConfig, dtype: torch.dtype, *, mapped: bool = False
) -> PreTrainedModel:
    """Build a module without initialising it, and fill it. Weights that need a conversion go transformers' slower way.

    Args:
        folder: a local copy of `uri`.
        uri: for messages.
        config: configuration in the folder.
        dtype: number format of the module.
        mapped: whether to keep the files' pages instead of a copy, for a module that is never swapped.

    Raises:
        TaskError: `model_unloadable`.
    """
    check_weights_format(folder, uri)
    with unloadable(uri, WEIGHTS_OF_CONFIG):
        module = build_empty(config, dtype)
        try:
            (map_into if mapped else load_into)(module, safetensors_files(folder))
        except MismatchError:
            return _load_converted(folder, uri, config, dtype)
        if (folder / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(folder)
        return module


def build_empty(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a module on the CPU. Its parameters and persistent buffers keep the memory's old content."""
    with building_uninitialized():
        module = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype, **kernels(config)))
    module.tie_weights()
    fix_single_outputs(module)
    return module


def loaded_from(policy: nn.Module, model: ModelSettings, uri: str) -> None:
    """Remember the source of a policy's first weights."""
    _origins[policy] = (model, uri)


def _load_converted(folder: Path, uri: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    arguments = {"dtype": dtype, "output_loading_info": True, **kernels(config)}
    with building():
        module, info = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    if info["missing_keys"] or info["mismatched_keys"]:
        lacking = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise TaskError(
            "model_unloadable",
            f"{uri} lacks {len(lacking)} of the weights that its config.json asks for, {lacking[0]} among them:"
            " give a complete folder",
        )
    fix_single_outputs(module)
    return cast(PreTrainedModel, module)
