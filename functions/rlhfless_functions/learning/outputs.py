"""The outputs of a learner in the store: a version of the weights, the critic, a checkpoint, the job's final model."""

import torch
from peft import PeftModel

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    PROMPTING,
    ExportRequest,
    ExportResult,
    LearnRequest,
    LearnResult,
    UnpublishedVersion,
    WeightsReference,
)
from rlhfless_functions.learning.checkpoints import save_checkpoint
from rlhfless_functions.learning.state import TrainingState
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.settings import ModelSettings
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
from rlhfless_functions.weights.saving import HUB_SHARD_BYTES


def publish(request: LearnRequest, state: TrainingState) -> None:
    """Publish the version that a step made, and its checkpoint if one is due. Every rank calls this."""
    publish_version(version_of(request), request.model, state)
    if request.save_checkpoint is not None:
        save_checkpoint(request.save_checkpoint, state)


def publish_version(
    version: UnpublishedVersion,
    model: ModelSettings,
    state: TrainingState,
    policy: dict[str, torch.Tensor] | None = None,
    critic: dict[str, torch.Tensor] | None = None,
) -> None:
    """Publish a version from the state that made it. Every rank calls this.

    Args:
        policy: a copy of the tensors of the policy, or of its adapter, if a single rank has one; by default the present
            ones.
        critic: the same for the critic.
    """
    dtype, ranks = torch_dtype(model), state.ranks
    if isinstance(state.policy, PeftModel):
        if ranks.size == 1:
            publish_adapter(version.weights, state.policy, state=policy)
        else:
            publish_adapter_together(version.weights, state.policy, ranks)
    elif ranks.size == 1:
        publish_weights(version.weights, state.policy, state.tokenizer, dtype, since=version.since, state=policy)
    else:
        publish_weights_together(version.weights, state.policy, state.tokenizer, dtype, ranks, since=version.since)
    if state.critic is not None and version.critic is not None:
        if ranks.size == 1:
            publish_critic(version.critic, state.critic, dtype, state=critic)
        else:
            publish_critic_together(version.critic, state.critic, dtype, ranks)


def version_of(request: LearnRequest) -> UnpublishedVersion:
    """Return the version that a request's step makes."""
    since = request.base.uri if request.learning.weight_deltas == "auto" and request.model.lora is None else None
    return UnpublishedVersion(weights=request.publish, critic=request.publish_critic, since=since)


def result_of(request: LearnRequest, metrics: dict[str, float]) -> LearnResult:
    """Return the result of a request whose step is its version."""
    step, critic = request.batch.step, request.publish_critic
    if request.model.lora is not None:
        weights = request.initial.model_copy(update={"version": step, "adapter": request.publish})
    else:
        weights = WeightsReference(version=step, uri=request.publish)
    return LearnResult(
        weights=weights,
        critic=WeightsReference(version=step, uri=critic) if critic is not None else None,
        checkpoint=request.save_checkpoint,
        metrics=metrics,
    )


def is_published(version: UnpublishedVersion) -> bool:
    """Return whether everything of a version is published."""
    with store_errors():
        return all(artifacts.is_published(uri) for uri in (version.weights, version.critic) if uri is not None)


def published_bytes(version: UnpublishedVersion, model: ModelSettings, state: TrainingState) -> dict[str, float]:
    """Return the bytes of a published version, and its bytes if it were published as full weights."""
    if state.ranks.rank:
        return {}
    with store_errors():
        manifest = artifacts.manifest(version.weights)
    assert manifest is not None
    adapted = isinstance(state.policy, PeftModel)
    numbers = sum(p.numel() for name, p in state.policy.named_parameters() if not (adapted and p.requires_grad))
    delta = manifest.delta.files.values() if manifest.delta is not None else ()
    return {
        **({"weights/delta_bytes": float(sum(entry.size for entry in delta))} if delta else {}),
        "weights/bytes": float(sum(entry.size for entry in manifest.files.values())),
        "weights/full_bytes": float(numbers * torch_dtype(model).itemsize),
    }


def export(request: ExportRequest) -> ExportResult:
    """Publish one version as a plain Hugging Face folder, with a merged adapter, or as a peft folder."""
    tokenizer = load_tokenizer(request.model, request.weights)
    policy = load_policy(request.model, request.weights, torch.float32)
    texts = {"README.md": request.model_card, PROMPTING: request.prompting.model_dump_json(indent=2)}
    if isinstance(policy, PeftModel):
        assert request.model.lora is not None
        if request.model.lora.export == "adapter":
            publish_adapter(request.destination, policy, tokenizer, texts=texts)
            return ExportResult(uri=request.destination)
        policy = merge_adapter(policy)
    dtype = torch_dtype(request.model)
    publish_weights(request.destination, policy, tokenizer, dtype, texts=texts, shard_bytes=HUB_SHARD_BYTES)
    return ExportResult(uri=request.destination)
