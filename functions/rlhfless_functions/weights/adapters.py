"""Low-rank adapters, through peft."""

from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rlhfless_functions import artifacts
from rlhfless_functions.settings import LoraSettings
from rlhfless_functions.task import TaskError
from rlhfless_functions.weights.saving import saving
from rlhfless_functions.weights.source import store_errors, unloadable, weights_folder

_NAME = "default"
_FILE = "adapter_model.safetensors"


def attach_adapter(policy: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """Put a fresh adapter on a model; the output does not change. Every call draws the same numbers.

    The adapter is float32 whatever the backbone is, in the sampler and in the trainer alike.

    Raises:
        TaskError: if the model does not have the target modules.
    """
    targets: str | list[str] = "all-linear" if settings.target_modules == ["all-linear"] else settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha),
        lora_dropout=settings.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(devices=[]):
            adapted = cast(PeftModel, get_peft_model(policy, config, adapter_name=_NAME))
    except ValueError as error:
        raise TaskError("model_unloadable", f"model.lora.targetModules does not fit this model: {error}") from error
    _reset(adapted)
    return adapted


def load_adapter_into(policy: PeftModel, uri: str | None) -> None:
    """Fill the adapter of a model from a published one, in place; None stands for a fresh adapter.

    Raises:
        TaskError: if it cannot be had or does not fit; the adapter is as it was.
    """
    if uri is None:
        _reset(policy)
        return
    folder = weights_folder(uri)
    with unloadable(uri, "give an adapter of the job's own model, rank and target modules"):
        tensors = load_file(folder / _FILE)
        own = _state(policy)
        for name in sorted(own.keys() | tensors.keys()):
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
                raise ValueError(f"{name} is missing, unknown or of another shape")
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)


def publish_adapter(uri: str, policy: PeftModel) -> None:
    """Publish a model's adapter as a peft folder; nothing happens if `uri` has been published before.

    Raises:
        TaskError: `artifact_unwritable`; nothing is published.
    """
    with store_errors(), artifacts.publish(uri) as folder, saving():
        policy.save_pretrained(folder, save_embedding_layers=False)


def merge_adapter(policy: PeftModel) -> PreTrainedModel:
    """The plain model that computes what backbone and adapter compute together; `policy` is used up."""
    return cast(PreTrainedModel, policy.merge_and_unload())


def _state(policy: PeftModel) -> dict[str, torch.Tensor]:
    return cast(dict[str, Any], get_peft_model_state_dict(policy, adapter_name=_NAME, save_embedding_layers=False))


def _reset(policy: PeftModel) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for module in policy.modules():
            if isinstance(module, LoraLayer):
                module.reset_lora_parameters(_NAME, init_lora_weights=True)
