"""What a learner writes to the store: a version of the weights, the critic, a checkpoint, the job's final model."""

import torch
from peft import PeftModel

from rlhfless_functions import artifacts
from rlhfless_functions.api import ExportRequest, ExportResult, LearnRequest, LearnResult, WeightsReference
from rlhfless_functions.learning.checkpoints import save_checkpoint
from rlhfless_functions.learning.state import TrainingState
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.weights import (
    load_policy,
    load_tokenizer,
    merge_adapter,
    publish_adapter,
    publish_adapter_together,
    publish_critic,
    publish_critic_together,
    publish_weights,
    publish_weights_together,
)
from rlhfless_functions.weights.policy import torch_dtype


def publish(request: LearnRequest, state: TrainingState) -> LearnResult:
    """Publish the version that a step made, and its checkpoint if one is due. Every rank calls this."""
    dtype, ranks = torch_dtype(request.model), state.ranks
    since = request.base.uri if request.learning.weight_deltas == "auto" else None
    if isinstance(state.policy, PeftModel):
        if ranks.size == 1:
            publish_adapter(request.publish, state.policy)
        else:
            publish_adapter_together(request.publish, state.policy, ranks)
        weights = request.initial.model_copy(update={"version": state.version, "adapter": request.publish})
    else:
        if ranks.size == 1:
            publish_weights(request.publish, state.policy, state.tokenizer, dtype, since=since)
        else:
            publish_weights_together(request.publish, state.policy, state.tokenizer, dtype, ranks, since=since)
        weights = WeightsReference(version=state.version, uri=request.publish)
    critic = None
    if state.critic is not None and request.publish_critic is not None:
        if ranks.size == 1:
            publish_critic(request.publish_critic, state.critic, dtype)
        else:
            publish_critic_together(request.publish_critic, state.critic, dtype, ranks)
        critic = WeightsReference(version=state.version, uri=request.publish_critic)
    if request.save_checkpoint is not None:
        save_checkpoint(request.save_checkpoint, state)
    return LearnResult(weights=weights, critic=critic, checkpoint=request.save_checkpoint, metrics={})


def published_bytes(request: LearnRequest, state: TrainingState) -> dict[str, float]:
    """Bytes of the version that was just published, and its bytes if it were published as full weights."""
    if state.ranks.rank:
        return {}
    with store_errors():
        manifest = artifacts.manifest(request.publish)
    assert manifest is not None
    adapted = isinstance(state.policy, PeftModel)
    numbers = sum(p.numel() for name, p in state.policy.named_parameters() if not (adapted and p.requires_grad))
    delta = manifest.delta.files.values() if manifest.delta is not None else ()
    return {
        **({"weights/delta_bytes": float(sum(entry.size for entry in delta))} if delta else {}),
        "weights/bytes": float(sum(entry.size for entry in manifest.files.values())),
        "weights/full_bytes": float(numbers * torch_dtype(request.model).itemsize),
    }


def export(request: ExportRequest) -> ExportResult:
    """Publish one version as a plain Hugging Face folder, with a merged adapter, or as a peft folder."""
    tokenizer = load_tokenizer(request.model, request.weights)
    policy = load_policy(request.model, request.weights, torch.float32)
    if isinstance(policy, PeftModel):
        assert request.model.lora is not None
        if request.model.lora.export == "adapter":
            publish_adapter(request.destination, policy, tokenizer, readme=request.model_card)
            return ExportResult(uri=request.destination)
        policy = merge_adapter(policy)
    publish_weights(request.destination, policy, tokenizer, torch_dtype(request.model), readme=request.model_card)
    return ExportResult(uri=request.destination)
