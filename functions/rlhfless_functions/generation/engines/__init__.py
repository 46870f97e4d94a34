"""The engines that compute tokens.

- `base` is their interface, `choice` selects one. `transformers` is ours on plain transformers models, `vllm/` is on
  vLLM, `replay` emulates a GPU.
- Ours: `continuous_batch` with its `batch_rows`, `kept_rows`, `kv_cache`, `prefill`, `passes`, `attention` and
  `memory`.
- All draw tokens by `sampling`, with the `randomness` and `seeds` of a sample, and end at `stop_strings`.
"""
