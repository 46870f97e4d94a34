"""AdamW and Muon over named parameters, and the learning-rate schedule."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlhfless_functions.distributed.sharding import local, whole
from rlhfless_functions.settings import OptimizerSettings


class NonFiniteGradientError(ArithmeticError):
    """A gradient is NaN or infinite; nothing was updated."""


def schedule_factor(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """Return the share of the peak learning rate in a training step.

    The w steps of the warm-up have 1/(w+1), 2/(w+1), … of the peak, and the next step has all of it. A linear or cosine
    schedule then falls. It would reach `final_ratio` in the step after the last, so no step has a rate of zero.

    Args:
        settings: of the job.
        step: training step, from 1.
        total_steps: of the job; steps beyond it have `final_ratio`.
    """
    warmup = settings.warmup_steps
    if step <= warmup:
        return step / (warmup + 1)
    progress = min(1.0, (step - warmup - 1) / max(1, total_steps - warmup))
    if settings.schedule == "constant":
        return 1.0
    fall = progress if settings.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - settings.final_ratio) * fall


class ModelOptimizer:
    """The optimizer of one model's trainable parameters: AdamW, or Muon for hidden matrices and AdamW for the rest.

    Weight decay is decoupled. It does not apply to norms, biases and other one-dimensional parameters, and not to
    embeddings, heads and adapters on them. AdamW is arXiv 1711.05101; Muon orthogonalises the momentum of hidden
    matrices (Jordan et al., 2024). It is scaled to AdamW's update size (arXiv 2502.16982), and both use one learning
    rate.

    With `settings.offload`, moments and a copy of the parameters are in the host's memory (12 bytes a parameter), and
    the host takes the steps. The accelerator keeps only weights and gradients.

    Args:
        model: in float32; parameters that need no gradient do not change.
        settings: of the job.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._stepped = [_stepped(parameter, offload=settings.offload) for parameter in self._parameters]
        self._settings = settings
        embeddings = _embedding_parameters(model)
        pairs = list(zip(self._parameters, self._stepped, strict=True))
        muon = [own for p, own in pairs if p.ndim == 2 and id(p) not in embeddings and settings.name == "muon"]
        with_muon = {id(own) for own in muon}
        decayed = [own for p, own in pairs if p.ndim >= 2 and id(p) not in embeddings and id(own) not in with_muon]
        plain = [own for p, own in pairs if p.ndim < 2 or id(p) in embeddings]
        self._optimizers: list[torch.optim.Optimizer] = []
        self._decays: list[list[bool]] = []
        """For each group of each optimizer, whether weight decay applies to it."""
        groups = [(parameters, decays) for parameters, decays in ((decayed, True), (plain, False)) if parameters]
        if groups:
            self._decays.append([decays for _, decays in groups])
            parts = [{"params": parameters} for parameters, _ in groups]
            self._optimizers.append(torch.optim.AdamW(parts, lr=settings.learning_rate, fused=True))
        if muon:
            self._decays.append([True])
            self._optimizers.append(torch.optim.Muon(muon, lr=settings.learning_rate, adjust_lr_fn="match_rms_adamw"))
        self.use(settings)

    def use(self, settings: OptimizerSettings) -> None:
        """Use these settings for the next steps, except `name` and `offload`, which can't change."""
        fixed = {"name": self._settings.name, "offload": self._settings.offload}
        self._settings = settings.model_copy(update=fixed)
        for optimizer, decays in zip(self._optimizers, self._decays, strict=True):
            for group, decayed in zip(optimizer.param_groups, decays, strict=True):
                group["weight_decay"] = settings.weight_decay if decayed else 0.0
                if isinstance(optimizer, torch.optim.AdamW):
                    group |= {"betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
                else:
                    group["momentum"] = settings.beta1

    def update(self, factor: float) -> float:
        """Clip the accumulated gradients, take one step with them, and clear them.

        Args:
            factor: share of the peak learning rate.

        Returns:
            The global norm of the gradients before clipping.

        Raises:
            NonFiniteGradientError: the parameters have not changed.
        """
        norm = float(whole(nn.utils.clip_grad_norm_(self._parameters, self._settings.max_gradient_norm)))
        if not math.isfinite(norm):
            self.clear()
            raise NonFiniteGradientError(f"the gradient's norm is {norm}")
        for parameter, own in zip(self._parameters, self._stepped, strict=True):
            if own is not parameter:
                own.grad = None if parameter.grad is None else local(parameter.grad).to(own.device)
                parameter.grad = None
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._settings.learning_rate * factor
            optimizer.step()
        if self._settings.offload:
            with torch.no_grad():
                for parameter, own in zip(self._parameters, self._stepped, strict=True):
                    local(parameter).copy_(own)
        self.clear()
        return norm

    def clear(self) -> None:
        """Clear the accumulated gradients."""
        for parameter in (*self._parameters, *self._stepped):
            parameter.grad = None

    def follow(self, place: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Follow the model's parameters to another device; with `settings.offload` nothing moves.

        Args:
            place: returns a tensor's copy on that device.
        """
        if self._settings.offload:
            return
        for parameter, own in zip(self._parameters, self._stepped, strict=True):
            if own is not parameter:
                own.data = local(parameter.detach())
        for optimizer in self._optimizers:
            for moments in optimizer.state.values():
                # All of them: a fused AdamW has its step counts on the device too.
                moments.update({name: place(each) for name, each in moments.items() if torch.is_tensor(each)})

    def state(self) -> list[dict[str, Any]]:
        """Return moments and step counts, as torch's state dictionaries."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Load an earlier state of the same model's optimizer. The model must have that state's parameters already.

        Raises:
            ValueError: the state belongs to another optimizer or another model.
        """
        if len(state) != len(self._optimizers):
            raise ValueError("the optimizer state belongs to another optimizer")
        for optimizer, saved in zip(self._optimizers, state, strict=True):
            optimizer.load_state_dict(saved)
        # A state dictionary also has the settings of the step after which it was saved.
        self.use(self._settings)
        if self._settings.offload:
            with torch.no_grad():
                for parameter, own in zip(self._parameters, self._stepped, strict=True):
                    own.copy_(local(parameter))


def _stepped(parameter: nn.Parameter, *, offload: bool) -> nn.Parameter:
    """Return the tensor that an optimizer updates: the parameter, this rank's part of it in the same memory, or a copy
    on the host."""
    own = local(parameter.detach())
    if offload:
        return nn.Parameter(own.to("cpu", copy=True))
    return nn.Parameter(own) if isinstance(parameter, DTensor) else parameter


def _embedding_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of embeddings and output heads, tied or not, and of adapters on them."""
    modules: Iterable[nn.Module] = (m for m in model.modules() if isinstance(getattr(m, "base_layer", m), nn.Embedding))
    heads = [model.get_output_embeddings()] if hasattr(model, "get_output_embeddings") else []
    heads += [model.score] if hasattr(model, "score") else []
    return {id(p) for module in (*modules, *heads) if module is not None for p in module.parameters()}
