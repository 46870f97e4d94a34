"""Low-rank adapters, through peft."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from rlhfless_functions import artifacts
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings
from rlhfless_functions.weights.building import building
from rlhfless_functions.weights.row_bits import fix_single_outputs
from rlhfless_functions.weights.saving import saving, write_tokenizer
from rlhfless_functions.weights.source import unloadable, weights_folder

_NAME = "default"
_FILE = "adapter_model.safetensors"
_BACKBONE = "backbone.json"

_backbones: WeakKeyDictionary[PeftModel, str] = WeakKeyDictionary()
"""Fingerprints of the adapters' backbones, if they are known."""


def attach_adapter(policy: PreTrainedModel, settings: LoraSettings, backbone: str | None = None) -> PeftModel:
    """Put a fresh adapter on a model; the output does not change. Every call draws the same numbers.

    The adapter is always float32, in the sampler and in the trainer.

    Args:
        policy: the model.
        settings: rank, scale and target modules.
        backbone: fingerprint of the model's weights. Every version of the adapter is bound to it.

    Raises:
        TaskError: the model lacks the target modules, or shares their weights with others.
    """
    _check_targets(policy, settings.target_modules)
    targets: str | list[str] = "all-linear" if settings.target_modules == ["all-linear"] else settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha),
        lora_dropout=settings.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        with building(), torch.random.fork_rng(devices=[]):
            adapted = cast(PeftModel, get_peft_model(policy, config, adapter_name=_NAME))
    except ValueError as error:
        raise TaskError("model_unloadable", f"model.lora.targetModules does not fit this model: {error}") from error
    names = adapted.peft_config[_NAME].target_modules
    if isinstance(names, set):
        # Its files must be the same in each process, and the order of a set is not.
        adapted.peft_config[_NAME].target_modules = sorted(names)
    fix_single_outputs(adapted)
    with building():
        _reset(adapted)
    if backbone is not None:
        _backbones[adapted] = backbone
    return adapted


def load_adapter_into(policy: PeftModel, uri: str | None) -> None:
    """Fill a model's adapter from a published one, in place; None stands for a fresh adapter.

    Raises:
        TaskError: it can't be had or does not fit; the adapter is unchanged.
    """
    if uri is None:
        _reset(policy)
        return
    with torch.no_grad():
        for own, tensor in adapter_pairs(policy, uri):
            own.copy_(tensor)


def adapter_pairs(policy: PeftModel, uri: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor of a model's adapter with its counterpart in a published one; all of them are checked.

    Raises:
        TaskError: it can't be had or does not fit.
    """
    folder = weights_folder(uri)
    with unloadable(uri, "give an adapter of the job's own model, rank and target modules"):
        check_backbone(folder, uri, _backbones.get(policy))
        tensors = load_file(folder / _FILE)
        own = cast(dict[str, Any], get_peft_model_state_dict(policy, adapter_name=_NAME, save_embedding_layers=False))
        for name in sorted(own.keys() | tensors.keys()):
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
                raise ValueError(f"{name} is missing, unknown or of another shape")
        return [(own[name], tensor) for name, tensor in tensors.items()]


def publish_adapter(
    uri: str,
    policy: PeftModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Publish a model's adapter as a peft folder; do nothing if `uri` has been published before.

    Args:
        uri: the folder.
        policy: the model with its adapter.
        tokenizer: saved with it, if the folder is for people.
        texts: contents of further files, by name.
        state: the adapter's parameters by their names in the model; by default the present ones.

    Raises:
        TaskError: `artifact_unwritable`; nothing is published.
    """
    with store_errors(), artifacts.publish(uri) as folder:
        write_adapter(folder, policy, state)
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder)
        for name, text in (texts or {}).items():
            (folder / name).write_text(text, encoding="utf-8")


def write_adapter(folder: Path, policy: PeftModel, state: dict[str, torch.Tensor] | None = None) -> None:
    """Write a peft folder.

    Args:
        folder: an existing folder.
        policy: the model with its adapter.
        state: the adapter's parameters by their names in the model, if the model holds parts of them or newer ones.

    Raises:
        OSError: if the disk is full.
    """
    with saving():
        policy.save_pretrained(folder, save_embedding_layers=False, state_dict=state)
    (folder / "README.md").unlink(missing_ok=True)  # peft's is a form to fill in
    if policy in _backbones:
        (folder / _BACKBONE).write_text(json.dumps({"fingerprint": _backbones[policy]}))


def merge_adapter(policy: PeftModel) -> PreTrainedModel:
    """Return the plain model that computes the same as backbone and adapter together. `policy` is used up."""
    return cast(PreTrainedModel, policy.merge_and_unload())


def _check_targets(policy: PreTrainedModel, targets: list[str]) -> None:
    """Refuse targets that peft would misread: it ignores names without a match if another one matches, and merges into
    all modules that share a weight."""
    if targets == ["all-linear"]:
        return
    names = [name for name, _ in policy.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            known = sorted({name.rpartition(".")[2] for name, module in policy.named_modules() if _adaptable(module)})
            raise TaskError(
                "model_unloadable",
                f"model.lora.targetModules: {target} is no layer of this model: name some of {', '.join(known)},"
                " or all-linear",
            )
    head, embedding = policy.get_output_embeddings(), policy.get_input_embeddings()
    if head is not None and embedding is not None and head.weight is embedding.weight:
        tied = [name for name, module in policy.named_modules() if module is head or module is embedding]
        for target in targets:
            if any(name == target or name.endswith(f".{target}") for name in tied):
                raise TaskError(
                    "model_unloadable",
                    f"model.lora.targetModules: {target} shares its weight in this model ({' and '.join(tied)} are"
                    " tied), and after merging, a plain model can't adapt only one of them: leave it out",
                )


def _adaptable(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def check_backbone(folder: Path, uri: str, ours: str | None) -> None:
    """Refuse an adapter that was trained on another backbone.

    Args:
        folder: folder of the adapter, a copy of `uri`.
        uri: for the message.
        ours: fingerprint of the loaded backbone, if it is known.

    Raises:
        TaskError: `model_unloadable`.
    """
    file = folder / _BACKBONE
    theirs = json.loads(file.read_text())["fingerprint"] if file.is_file() else None
    if None not in (ours, theirs) and ours != theirs:
        raise TaskError(
            "model_unloadable",
            f"{uri} is an adapter of another backbone (fingerprint {theirs}) than the one that is loaded ({ours}):"
            " give model.source the model that it was trained on",
        )


def _reset(policy: PeftModel) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in policy.modules():
            if isinstance(module, LoraLayer):
                module.reset_lora_parameters(_NAME, init_lora_weights=True)
