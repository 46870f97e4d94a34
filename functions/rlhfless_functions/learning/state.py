"""A learner's state in memory between steps: the models that learn, and their optimizers."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhfless_functions.api import FailureReason, LearnRequest, WeightsReference
from rlhfless_functions.distributed.ranks import Ranks
from rlhfless_functions.distributed.sharding import Unit, hold_parts, unit_of
from rlhfless_functions.learning.host_copy import HostCopy
from rlhfless_functions.learning.optimizers import ModelOptimizer
from rlhfless_functions.model.forward import body_of
from rlhfless_functions.model.packed_attention import is_packed, use_packing
from rlhfless_functions.model.shared_prompts import can_share_prompts
from rlhfless_functions.model.trial import check_passes
from rlhfless_functions.runtime.device_memory import give_back
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import CriticSettings, ModelSettings, OptimizerSettings
from rlhfless_functions.weights import CriticModel, check_sharded_publishing, load_critic, load_policy, load_tokenizer
from rlhfless_functions.weights.parts import can_fill_parts, drop_content, empty_policy, fill_parts


@dataclass
class TrainingState:
    """Models and optimizers after a training step. It is a cache, which a learner restores by repeating steps."""

    job_uid: str
    """Unique id of its job's incarnation."""
    version: int
    """Training steps taken."""
    policy: PreTrainedModel | PeftModel
    """float32 master weights; with an adapter, the backbone has the job's number format and only the adapter learns."""
    policy_optimizer: ModelOptimizer
    critic: CriticModel | None
    critic_optimizer: ModelOptimizer | None
    tokenizer: PreTrainedTokenizerBase
    policy_unit: Unit
    """The module that computes with the policy; with several ranks, each holds a part."""
    critic_unit: Unit | None = None
    """The module that computes with the critic."""
    ranks: Ranks = field(default_factory=Ranks)
    """Processes that learn together."""
    packed: bool = False
    """Whether policy and critic get packed rows."""
    compiled: bool = False
    """Whether their layers are compiled."""
    host_copy: HostCopy | None = None
    """Memory for the tensors while another process has the device; kept for the next time."""

    @property
    def device(self) -> torch.device:
        """Device of the models."""
        return next(self.policy.parameters()).device

    def use(self, request: LearnRequest) -> None:
        """Apply a request's settings to the optimizers."""
        self.policy_optimizer.use(request.optimizer)
        if self.critic_optimizer is not None:
            self.critic_optimizer.use(_of_critic(request))


def load_master_weights(model: ModelSettings, weights: WeightsReference) -> PreTrainedModel | PeftModel:
    """Load a policy to train.

    A backbone below an adapter stays in the job's number format: it is frozen and needs no more precision, and it
    computes the same as the sampler's.

    Raises:
        TaskError: it can't be loaded.
    """
    return load_policy(model, weights, torch.float32 if model.lora is None else None)


def initial_state(
    request: LearnRequest, policy: PreTrainedModel | PeftModel | None = None, ranks: Ranks | None = None
) -> TrainingState:
    """Make the state before the first step: the original model, and a critic with its body and a zero head.

    Args:
        request: any of the job's learning requests.
        policy: result of `load_master_weights` for the initial weights, if it has been loaded already.
        ranks: processes that learn together; by default this one alone.

    Raises:
        TaskError: the model can't be loaded or trained.
    """
    ranks = ranks or Ranks()
    learning, device = request.learning, ranks.device
    compiled = learning.compile and ranks.size == 1
    if compiled:
        _check_compiler(device)

    def tried(policy: PreTrainedModel | PeftModel) -> bool:
        """Refuse a model that can't be trained, or return whether it gets packed rows."""
        if ranks.size > 1:
            check_sharded_publishing(policy)
        check_passes(policy, request.initial.uri)
        # The compiler sees one shape for all packed rows, but several for padded passes.
        pack = "always" if compiled and learning.pack == "auto" else learning.pack
        return is_packed(pack, body_of(policy), device, _arithmetic(request, policy, device))

    in_parts = False
    if ranks.size > 1 and request.model.lora is None:
        policy, packed, in_parts = _tried_by_first(request, policy, ranks, tried)
    else:
        policy = policy or load_master_weights(request.model, request.initial)
        if ranks.size == 1:
            policy.to(device)
        packed = tried(policy)
    use_packing(body_of(policy), packed)
    if learning.share_prompts and ranks.size == 1:
        can_share_prompts(body_of(policy))  # Its trial comes before dropout.
    _make_trainable(policy, learning.gradient_checkpointing, compiled)
    policy_unit = unit_of(policy, ranks, _arithmetic(request, policy, device))
    if in_parts:
        hold_parts(policy_unit, device)
        fill_parts(policy, request.model, request.initial, ranks)
    critic = critic_optimizer = critic_unit = None
    if request.algorithm.advantage == "gae":
        if in_parts:
            critic = CriticModel(cast(PreTrainedModel, empty_policy(request.model, request.initial).base_model)).eval()
        else:
            critic = load_critic(request.model, request.initial, torch.float32)
        if ranks.size == 1:
            critic.to(device)
        use_packing(critic.body, packed)
        _make_trainable(critic.body, learning.gradient_checkpointing, compiled)
        critic_unit = unit_of(critic, ranks, _arithmetic(request, critic, device), exact=[critic.score])
        if in_parts:
            hold_parts(critic_unit, device)
            fill_parts(critic.body, request.model, request.initial, ranks, prefix=f"{critic.body.base_model_prefix}.")
        critic_optimizer = ModelOptimizer(critic, _of_critic(request))
    return TrainingState(
        job_uid=request.key.job_uid,
        version=0,
        policy=policy,
        policy_optimizer=ModelOptimizer(policy, request.optimizer),
        critic=critic,
        critic_optimizer=critic_optimizer,
        tokenizer=load_tokenizer(request.model, request.initial),
        policy_unit=policy_unit,
        critic_unit=critic_unit,
        ranks=ranks,
        packed=packed,
        compiled=compiled,
    )


def _tried_by_first(
    request: LearnRequest,
    loaded: PreTrainedModel | PeftModel | None,
    ranks: Ranks,
    tried: Callable[[PreTrainedModel | PeftModel], bool],
) -> tuple[PreTrainedModel | PeftModel, bool, bool]:
    """Try a policy that several ranks will share, on the first of them: the others need not hold it as a whole.

    Returns:
        The policy; the trial's result; and whether the policy has no content yet, so that each rank reads its part.

    Raises:
        TaskError: the trial's, on every rank.
    """
    outcome: tuple[bool, bool] | tuple[FailureReason, str, bool] | None = None
    if ranks.rank == 0:
        try:
            policy = loaded or load_master_weights(request.model, request.initial)
            packed = tried(policy)
            in_parts = can_fill_parts(policy, request.model, request.initial)
            if in_parts:
                drop_content(policy)
                give_back()
            outcome = packed, in_parts
        except TaskError as error:
            outcome = error.reason, str(error), error.retryable
    else:
        policy = empty_policy(request.model, request.initial)
    told = ranks.all(outcome)[0]
    assert told is not None
    if len(told) == 3:
        reason, message, retryable = told
        raise TaskError(reason, message, retryable=retryable)
    packed, in_parts = told
    if not in_parts and ranks.rank > 0:
        policy = load_master_weights(request.model, request.initial)
    return policy, packed, in_parts


def _of_critic(request: LearnRequest) -> OptimizerSettings:
    """Return the settings of the critic's AdamW: those of the policy with another learning rate."""
    own = request.algorithm.critic or CriticSettings()
    return request.optimizer.model_copy(update={"name": "adamw", "learning_rate": own.learning_rate})


NARROWEST_ON_CPU = 256
"""Hidden size from which bfloat16 is faster on a CPU that supports it: 1.3 times faster than float32 at 256, 2 times at
1024, and 2 times slower at 96, where conversions cost more than products."""


def autocast(request: LearnRequest, model: PreTrainedModel | PeftModel | CriticModel) -> AbstractContextManager[None]:
    """Give bfloat16 arithmetic for float32 weights, if the job wants it, the hardware has it and it is faster.

    Unless the job says otherwise, master weights of a bfloat16 model want it, and a float32 model stays in float32. An
    adapter's backbone of a bfloat16 model is in bfloat16 already.
    """
    weight = next(model.parameters())
    dtype = _arithmetic(request, model, weight.device)
    if isinstance(weight, DTensor):
        return nullcontext()  # Several ranks gather weights in the format of the arithmetic.
    return nullcontext() if dtype == weight.dtype else torch.autocast(weight.device.type, dtype)


def _arithmetic(
    request: LearnRequest, model: PreTrainedModel | PeftModel | CriticModel, device: torch.device
) -> torch.dtype:
    """Return the number format in which a model computes on a device."""
    weight = next(model.parameters())
    asked = request.learning.autocast
    wanted = (request.model.dtype == "bfloat16" if asked is None else asked) and weight.dtype == torch.float32
    wide = device.type != "cpu" or model.config.get_text_config().hidden_size >= NARROWEST_ON_CPU
    return torch.bfloat16 if wanted and wide and has_bfloat16(device) else weight.dtype


def arithmetic_of(request: LearnRequest, state: TrainingState) -> dict[str, str]:
    """Say how a step computes, for the log: what this process chose by its hardware."""
    dtype = state.policy_unit.gathered or _arithmetic(request, state.policy, state.device)
    head = torch.bfloat16 if state.device.type == "cuda" and dtype == torch.bfloat16 else torch.float32
    said = {"layers": str(dtype), "products of the head": str(head)}
    if state.ranks.size > 1:
        said["gradients exchanged"] = "once an update" if state.policy_unit.can_wait else "each pass"
    return {name: value.removeprefix("torch.") for name, value in said.items()}


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the device multiplies matrices in bfloat16 natively: an emulation would be slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.11; older ones stay in float32
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def _check_compiler(device: torch.device) -> None:
    """Check for a compiler: code for a CPU is C++, and code that launches kernels on a GPU is C."""
    language, variable, usual = ("C++", "CXX", "g++") if device.type == "cpu" else ("C", "CC", "gcc")
    if not any(shutil.which(name) for name in (os.environ.get(variable, usual), "clang++", "clang")):
        raise TaskError(
            "bad_request",
            f"learning.compile: the learning instance has no {language} compiler; install {usual}, name one in"
            f" {variable}, or remove the setting",
        )


def _make_trainable(model: nn.Module, gradient_checkpointing: bool, compiled: bool) -> None:
    """Put the model into evaluation mode, in which it computes the same as the sampler: only the adapter has
    dropout."""
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and gradient_checkpointing:
            module.training = True  # sets only the layer's own flag, which enables checkpointing
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        if isinstance(module, LoraLayer):
            module.lora_dropout.train()
        if isinstance(module, GradientCheckpointingLayer) and compiled:
            module.compile(dynamic=True)
