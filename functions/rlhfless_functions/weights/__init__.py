"""Weights in the Hugging Face layout: load, swap in place, publish.

- `policy`: the policy's weights. `adapters`: low-rank adapters. `critic`: the critic. `tokenizers`: the tokenizer.
- `source`: find weights in a folder, a store or on the hub. `support`: the models that can be trained.
- `tensors`: fill a module from safetensors files. `building`: build one model at a time.
- `arriving` and `arriving_files`: compute while the weights arrive. `prefetched`: hold the next weights in host memory.
- `saving`: write Hugging Face folders. `sharded`: publish from several ranks. `parts`: let each
  rank read its rows.
- `fingerprints`: tell weights from others. `row_bits`: compute each row alike in every batch.
"""

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
