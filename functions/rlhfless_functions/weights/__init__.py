"""Weights in the Hugging Face layout: load, swap in place, publish; adapters, critics and tokenizers with them."""

from rlhfless_functions.weights.adapters import attach_adapter, merge_adapter, publish_adapter
from rlhfless_functions.weights.arriving import ArrivingPolicy, NotArrivedError, load_arriving
from rlhfless_functions.weights.critic import CriticModel, load_critic, publish_critic, swap_critic
from rlhfless_functions.weights.policy import load_policy, publish_weights, swap_policy, torch_dtype
from rlhfless_functions.weights.prefetched import PrefetchedWeights, prefetch_policy, swappable_bytes, take_over
from rlhfless_functions.weights.sharded import (
    check_sharded_publishing,
    publish_adapter_together,
    publish_critic_together,
    publish_weights_together,
)
from rlhfless_functions.weights.source import load_config
from rlhfless_functions.weights.support import longest_sequence
from rlhfless_functions.weights.tokenizers import load_tokenizer

__all__ = [
    "ArrivingPolicy",
    "CriticModel",
    "NotArrivedError",
    "PrefetchedWeights",
    "attach_adapter",
    "check_sharded_publishing",
    "load_arriving",
    "load_config",
    "load_critic",
    "load_policy",
    "load_tokenizer",
    "longest_sequence",
    "merge_adapter",
    "prefetch_policy",
    "publish_adapter",
    "publish_adapter_together",
    "publish_critic",
    "publish_critic_together",
    "publish_weights",
    "publish_weights_together",
    "swap_critic",
    "swap_policy",
    "swappable_bytes",
    "take_over",
    "torch_dtype",
]
