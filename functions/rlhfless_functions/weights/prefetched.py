"""The next weights in host memory: read while the policy computes, swapped in at once.

A policy on a CPU takes over the memory of the new tensors. A policy on a GPU keeps its own memory, and the new tensors
are copied there from pinned pages.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.weights.adapters import adapter_pairs
from rlhfless_functions.weights.policy import policy_pairs

_ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector."""


@dataclass
class PrefetchedWeights:
    """A version that one policy can take over."""

    weights: WeightsReference
    policy: PreTrainedModel | PeftModel
    pairs: list[tuple[Tensor, Tensor]]
    """Each distinct tensor of the policy with its new content, in the policy's number format."""
    published: artifacts.Manifest | None
    """The manifest with which the version was published when it was read."""

    def is_of(self, policy: PreTrainedModel | PeftModel, weights: WeightsReference) -> bool:
        """Return whether this is the version that is now published as these weights, for this policy.

        A version that no driver has recorded may be published anew with other content.

        Raises:
            TaskError: `artifact_missing`, if the store can't be asked.
        """
        if self.policy is not policy or self.weights != weights:
            return False
        return self.published is not None and self.published == _manifest(weights)


def swappable_bytes(policy: PreTrainedModel | PeftModel) -> int:
    """Return the bytes that a version takes in host memory: those of the adapter if there is one, otherwise of the
    whole policy."""
    tensors = [each for each in policy.parameters() if each.requires_grad or not isinstance(policy, PeftModel)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def prefetch_policy(policy: PreTrainedModel | PeftModel, ref: WeightsReference) -> PrefetchedWeights:
    """Read a published version into host memory, checked. The policy may compute meanwhile, and stays as it is.

    Raises:
        TaskError: the weights can't be had or do not fit.
    """
    published = _manifest(ref)
    on_gpu = next(policy.parameters()).device.type == "cuda"
    pairs = []
    with torch.no_grad():
        for target, source in _sources(policy, ref):
            tensor = torch.empty_like(target, device="cpu", pin_memory=on_gpu, requires_grad=False)
            tensor.copy_(source)
            pairs.append((target, tensor))
    return PrefetchedWeights(ref, policy, pairs, published)


def take_over(prefetched: PrefetchedWeights) -> None:
    """Make the policy hold a prefetched version, which is used up.

    An error in the middle leaves a mixture of two versions, and the policy must not be used again.
    """
    pairs, prefetched.pairs = prefetched.pairs, []
    # An adapter has views of its tensors, which would take over the memory instead of them.
    whole = not isinstance(prefetched.policy, PeftModel)
    with torch.no_grad():
        for target, tensor in pairs:
            if whole and target.device.type == "cpu" and _aligned_alike(target, tensor):
                target.data = tensor
            else:
                target.copy_(tensor, non_blocking=True)
        if prefetched.policy.device.type == "cuda":
            torch.cuda.synchronize(prefetched.policy.device)


def _aligned_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether kernels compute the same bits with either: alignment can change the last ones. torch aligns its
    own memory, but some models are views of their files."""
    return one.data_ptr() % _ALIGNMENT == other.data_ptr() % _ALIGNMENT


def _sources(policy: PreTrainedModel | PeftModel, ref: WeightsReference) -> Iterable[tuple[Tensor, Tensor]]:
    if not isinstance(policy, PeftModel):
        return policy_pairs(policy, ref)
    if ref.adapter is None:
        raise TaskError("bad_request", f"version {ref.version} of the weights has no adapter")
    return adapter_pairs(policy, ref.adapter)


def _manifest(ref: WeightsReference) -> artifacts.Manifest | None:
    with store_errors():
        return artifacts.manifest(ref.adapter or ref.uri)
